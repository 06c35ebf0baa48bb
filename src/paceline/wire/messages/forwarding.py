"""Between servers, on behalf of workers of their host."""

from __future__ import annotations

import msgspec

from paceline.wire.messages.data import AskMissing, Entry, Leave, Pause, Stretch
from paceline.wire.messages.fields import Blob, Count, Message, Name, Number, Rank, Text


class ForwardedBucket(Message):
    """A bucket of a block that a server of another host owns."""

    index: Count
    length: Count
    owner: Rank


class ForwardBuckets(Message, tag=42):
    """Ask a server of this host to take pushes for servers of other hosts; answered with :class:`ValuesAt`."""

    store: Name
    block: Number
    dtype: Name
    buckets: list[ForwardedBucket]


class Share(Message):
    """What one worker has pushed of a sum."""

    worker: Rank
    samples: float
    before_barrier: bool
    """The worker pushed this before it came to the barrier at which it may be waiting."""
    rounds: list[Number]
    """Per entry of the sum."""


class PushSum(Message, tag=43):
    """A server pushes what workers of its host have pushed, summed; one frame per entry, answered with new values."""

    store: Name
    entries: list[Entry]
    """Their rounds do not count."""
    shares: list[Share]
    unit: float
    """Where the store merges to the mean: values times this are the sum of gradients times their samples."""
    options: Blob
    """Encoded StepOptions of the optimizer; empty: unchanged."""
    absent: list[Stretch] = msgspec.field(default_factory=list)
    """As in :class:`Push`: what is absent in the pushes of all its workers."""
    skip: bool = False
    """As in :class:`Push`, if any of its workers says so."""
    problem: Text = ""
    """Why the pushes of its workers do not go together: all who wait for the update get it as an error."""


class OnBehalf(Message, tag=44):
    """A server passes on what a worker of its host has said, in order with the sums that it pushes."""

    worker: Rank
    body: Leave | Pause | AskMissing
