"""Which batch a training loop has now, and of how many samples, where one of paceline's samplers has dealt it.

A *walk* is one iteration over a sampler. Loops ask for batches of one walk or of several.

| state of a walk | event                          | action                                   | next  |
|-----------------|--------------------------------|------------------------------------------|-------|
| open            | the loop gets its next batch   | that batch is the walk's latest          | open  |
| open            | the loop asks for one too many | the walk has no batch that is in use     | ended |
| open            | the loop leaves it early       | its latest batch may still be in use     | left  |
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False)
class DealtBatch:
    """A batch that a loop has got.

    Attributes:
        number: counts the batches of all walks of this process.
        samples: indices that the sampler has dealt for it.
        sampler: the sampler, which is not kept alive: its identity may be that of a later one.
    """

    number: int
    samples: int
    sampler: weakref.ref[object]


class Walk:
    """One iteration over a sampler.

    Args:
        sampler: the sampler.
    """

    def __init__(self, sampler: object) -> None:
        self._sampler = weakref.ref(sampler)
        self.latest: DealtBatch | None = None
        _open.append(self)

    def hand_out(self, samples: int) -> None:
        """Note that the loop has got the next batch."""
        self.latest = DealtBatch(next(_numbers), samples, self._sampler)

    def end(self) -> None:
        """Note that the loop has asked for one batch too many: none is in use. Idempotent."""
        if self in _open:
            _open.remove(self)
            _left.clear()

    def leave(self) -> None:
        """Note that the loop has left this walk, as ``next(iter(loader))`` does. Idempotent."""
        if self in _open:
            _open.remove(self)
            _left[:] = [self]


_open: list[Walk] = []
_left: list[Walk] = []
"""The walk that was left last, unless another one has ended since."""


def newest(after: int, last: DealtBatch | None) -> DealtBatch | None:
    """Return the batch that the loop has now; None: not known, or batches of several samplers are in use.

    Args:
        after: number of the newest batch at the last push.
        last: the batch behind the last push. Where no batch is newer, it is still in use; where several are, that of
            the same sampler counts (another one may be that of an evaluation).
    """
    if not (_open or _left):
        return None
    found = [walk.latest for walk in _open if walk.latest is not None]
    newer = [one for one in found if one.number > after]
    if len(newer) > 1 and last is not None:
        newer = [one for one in newer if one.sampler is last.sampler]
        if not newer:
            return None
    if newer:
        return newer[0] if len(newer) == 1 else None
    found += [walk.latest for walk in _left if walk.latest is not None]
    newer = [one for one in found if one.number > after]
    if newer:
        return newer[0]
    return last if last in found else None


def count() -> int:
    """Return the number of the newest batch of this process; 0: none."""
    if not (_open or _left):
        return 0
    return max((walk.latest.number for walk in (*_open, *_left) if walk.latest is not None), default=0)
