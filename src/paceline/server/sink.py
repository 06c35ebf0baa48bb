"""What a server's store gives complete cohorts to.

A store (:class:`~paceline.server.store.BucketStore`) merges pushes by the rule. What happens to a merged gradient, and
when its workers are answered, is the sink's business:

| sink | a cohort is complete | the rule releases its workers |
|---|---|---|
| :class:`~paceline.server.apply.ApplySink` | the updater runs | they are answered |
| :class:`~paceline.server.clip.ClipSink` | it is held until a worker brings its factor, then applied | so are they |
| :class:`~paceline.server.forward.sink.ForwardSink` | the sum is sent to the owner | they wait for its answer |

Order: the store calls ``complete`` before the ``release`` that follows from it. A sink owns the accumulator that it
gets, and closes it. It takes the requests that it answers out of ``slot.pending``: as long as a worker is in there, its
push is not answered, whatever the rule says.
"""

from __future__ import annotations

from typing import Protocol

from paceline.consistency import Apply, Release
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.merge import Accumulator


class Sink(Protocol):
    """Takes the complete cohorts of a store, and answers the workers behind them."""

    def complete(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply) -> None:
        """Take a complete cohort; the accumulator is the sink's from now on."""

    def release(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer workers, all of one unit, whose cohort the rule regards as applied; or do so later."""

    def forget(self, bucket: StoredBucket, slot: Slot, worker: int) -> None:
        """Note that a worker leaves: wait for nothing that it would have sent."""

    def before_read(self, bucket: StoredBucket, worker: int, start: int, length: int) -> None:
        """Make visible what a worker, which reads a range now, may see of it."""
