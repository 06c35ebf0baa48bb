"""Changes of the membership, and the samples that workers were dealt: what the log of a job is made of."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.wire.messages.fields import (
    OF_MEMBERS,
    Amount,
    Count,
    Counts,
    Groups,
    Line,
    Message,
    Name,
    Number,
    Rank,
    Ranks,
)

Kind = Annotated[str, Meta(max_length=8, pattern=r"^(starts|joins|left|died|regroups|walks)\Z")]


class Change(Message):
    """A generation: from here on other workers count, or count together."""

    generation: Number
    kind: Kind
    workers: Ranks
    """Whom it is about."""
    round: Number
    """The last round before it, of these workers: they count no more after it, or from the next one on."""
    why: Line = ""
    groups: Groups = msgspec.field(default_factory=list)
    """The groups from here on, if these have changed."""
    ago_s: Amount = 0.0
    """In a status: seconds since then."""


class Dealt(Message):
    """Global batches that a sampler deals, from a round on, until it says otherwise."""

    sampler: Name
    round: Number
    """The first one. A later word on a round counts more."""
    epoch: Number
    length: Count
    """Samples of the data."""
    seed: Number
    shuffle: bool
    first: Count
    """Place of the first one's first sample in the epoch's order."""
    stride: Count
    """Samples from one global batch to the next."""
    columns: Annotated[list[tuple[Rank, Count, Count]], OF_MEMBERS]
    """Of each worker, its part of each global batch: start and stop."""
    samples: Counts = msgspec.field(default_factory=list)
    """The samples of this one global batch, if they do not follow from the order; the next one has its own word."""
