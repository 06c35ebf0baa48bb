"""Between a worker, joined or not, and the scheduler: how it trains."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.wire.messages.fields import Count, Digest, HostName, Number, Rank, Request

#: Backward passes whose inputs of the model are compared.
MAX_INPUTS = 3


class Training(Request, tag=96):
    """How a worker trains, as far as it knows by itself; answered with :class:`Done`."""

    rank: Rank
    store: HostName = ""
    """Type of the store that it has made last, as in ``dist_sync``; empty: none."""
    group: HostName = ""
    """Backend of its process group of torch.distributed, if that has several processes and is not of this job."""
    wrapped: bool = False
    """It has made a DistributedOptimizer of that store."""
    steps: Number = 0
    """Steps of torch's optimizers."""
    passes: Number = 0
    """Backward passes."""
    exchanged: bool = False
    """It has pushed, or reduced with others."""
    unstepped: bool = False
    """Its weights change from pass to pass, and its DistributedOptimizer has made no step."""
    samples: Count = 0
    """Samples of the data set that its loader walks as a whole; 0: no such loader is known."""
    data: Digest = b""
    """Digest of that data set's content, and of the batches that the loop had at its first pass; empty: not known."""
    order: Number = 0
    """Equal numbers: walks in the same order; 0: not known."""
    inputs: Annotated[list[Number], Meta(max_length=MAX_INPUTS)] = msgspec.field(default_factory=list)
    """Checksums of the inputs of its model before each of the first passes; empty: not known, or always the same."""
    losses: Annotated[list[Number], Meta(max_length=MAX_INPUTS)] = msgspec.field(default_factory=list)
    """Checksums of the losses of these passes; without weights and chance that are alike, they prove nothing alone."""
