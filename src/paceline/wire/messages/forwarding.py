"""Messages between servers, on behalf of workers, and requests of workers to a server that forwards."""

from __future__ import annotations

from typing import Annotated

import msgspec

from paceline.wire.messages.data import AskMissing, Away, Entry, Leave, Pause, Span
from paceline.wire.messages.fields import (
    OF_KEYS,
    OF_MEMBERS,
    Blob,
    Count,
    Message,
    Name,
    Notes,
    Number,
    Rank,
    Request,
    Text,
)


class ForwardedBucket(Message):
    """A bucket of a block that a server of another host owns."""

    index: Count
    length: Count
    owner: Rank


class ForwardBuckets(Request, tag=42):
    """Ask a server of this host to forward pushes to the owners of buckets; answered with :class:`ValuesAt`."""

    store: Name
    block: Number
    dtype: Name
    buckets: Annotated[list[ForwardedBucket], OF_KEYS]


class Share(Message):
    """One worker's part of a sum."""

    worker: Rank
    samples: float
    rounds: Annotated[list[Number], OF_KEYS]
    """Per entry of the sum."""


class PushSum(Request, tag=43):
    """A server pushes the sum of pushes of workers of its host; one frame per entry, answered with values."""

    store: Name
    entries: Annotated[list[Entry], OF_KEYS]
    """Their rounds do not count."""
    shares: Annotated[list[Share], OF_MEMBERS]
    unit: float
    """Where the store merges to the mean: values times this are the sum of gradients times their samples."""
    options: Blob
    """Encoded StepOptions of the optimizer; empty: unchanged."""
    absent: Annotated[list[Span], OF_KEYS] = msgspec.field(default_factory=list)
    """As in :class:`Push`: ranges absent in the pushes of all its workers."""
    skip: bool = False
    """As in :class:`Push`, if any of its workers says so."""
    problem: Text = ""
    """Why the pushes of its workers cannot make one update: all workers that wait for it get this as an error."""
    notes: Notes = msgspec.field(default_factory=list)
    """Those of the pushes behind it."""


class OnBehalf(Request, tag=44):
    """A server passes on a message of a worker of its host to an owner, in order with the sums that it pushes."""

    worker: Rank
    body: Leave | Pause | Away | AskMissing
