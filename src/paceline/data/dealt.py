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
        self.batches = self.samples = 0
        """Those that the loop has got, or that have failed on their way to it."""
        self._uses, self._is_left, self.has_ended = _uses.noted, False, False
        _open.append(self)

    @property
    def has_only_looked(self) -> bool:
        """Whether the loop has left it with no backward pass since it began, as to see the shape of a batch."""
        return self._is_left and _uses.are_noted and self._uses == _uses.noted

    def hand_out(self, samples: int) -> None:
        """Note that the loop has got the next batch."""
        self.skip(samples)
        self.latest = DealtBatch(next(_numbers), samples, self._sampler)

    def skip(self, samples: int) -> None:
        """Note that the next batch has failed on its way to the loop."""
        self.batches, self.samples = self.batches + 1, self.samples + samples

    def end(self) -> None:
        """Note that the loop has asked for one batch too many: none is in use. Idempotent."""
        if self in _open:
            _open.remove(self)
            _left.clear()
            self.has_ended = True

    def leave(self) -> None:
        """Note that the loop has left this walk, as ``next(iter(loader))`` does. Idempotent."""
        if self in _open:
            _open.remove(self)
            _left[:], self._is_left = [self], True


@dataclass
class _Uses:
    """Backward passes and pushes of this process's optimizers."""

    noted: int = 0
    are_noted: bool = False
    """Whether there is an optimizer that notes them."""


_uses = _Uses()

_open: list[Walk] = []
_left: list[Walk] = []
"""The walk that was left last, unless another one has ended since."""


def note_uses() -> None:
    """Note that this process has an optimizer, which says when batches are used."""
    _uses.are_noted = True


def note_use() -> None:
    """Note that gradients of a batch were computed or pushed."""
    _uses.noted += 1


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
