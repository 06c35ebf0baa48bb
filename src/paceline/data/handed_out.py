"""The samples handed out of an epoch, and those that have to come once more.

A sample's *position* is its place in the epoch's order. Its *index* counts from the first sample of the epoch to the
last one, repetitions included: these have indices from the length of the data on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch of an epoch."""

    round: int
    """Round of its push."""
    first: int
    """Index of its first sample."""
    length: int
    """Samples of the epoch, as far as they were known: columns beyond begin the order again."""
    columns: dict[int, tuple[int, int]]
    """By worker, start and stop of its part; of what it has done of it, once that is known."""


class HandedOut:
    """The last global batches of an epoch, and the positions that come once more."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._batches: deque[GlobalBatch] = deque()
        """As many as may not be trained on yet."""
        self.again: list[int] = []
        """Positions that come once more, because their worker is gone or ran out of time."""

    @property
    def length(self) -> int:
        """Samples of the epoch, as far as they are known now."""
        return self._length + len(self.again)

    @property
    def last_round(self) -> int:
        """The round of the last global batch."""
        return self._batches[-1].round if self._batches else 0

    def position(self, index: int) -> int:
        """Return the position of an index."""
        return index if index < self._length else self.again[index - self._length]

    def begin(self, remembered: int) -> None:
        """Forget the global batches of the last epoch, and remember so many from here on."""
        self._batches = deque(maxlen=remembered)

    def rest(self, first: int) -> list[int]:
        """Return the positions from an index on."""
        return [self.position(index) for index in range(first, self.length)]

    def add(self, batch: GlobalBatch) -> None:
        """Note a global batch."""
        self._batches.append(batch)

    def first_of_last(self, count: int) -> int | None:
        """Return the first index of the last ``count`` global batches; None if there are not so many."""
        return self._batches[-count].first if 0 < count <= len(self._batches) else None

    def missing(self, worker: int, last: int, stop: int) -> list[int]:
        """Return the positions that a worker has not trained on that is gone since a round; ``stop`` is an index."""
        batches = [one for one in self._batches if one.round > last and one.first < stop and worker in one.columns]
        return [position for one in batches for position in self._positions(one, *one.columns[worker])]

    def cut_short(self, worker: int, done: int) -> None:
        """Let the rest of a worker's part of the last global batch come once more."""
        one = self._batches[-1]
        if worker in one.columns:
            start, stop = one.columns[worker]
            one.columns[worker] = start, start + done
            self.again += self._positions(one, start + done, stop)

    def _positions(self, one: GlobalBatch, start: int, stop: int) -> list[int]:
        return [self.position(one.first + i) for i in range(start, stop) if one.first + i < one.length]
