"""Finds losses that grow with the batch: they are sums over samples, where means are wanted. Pure.

Two batches of unlike size have two losses; with the same weights, or nearly the same, means over samples differ by
chance only, and sums as the sizes do. So pairs of batches tell the exponent b in ``loss = a * size ** b``: 0 for means,
1 for sums.

| pairs of batches                               | why they are compared            |
|------------------------------------------------|----------------------------------|
| of two workers in one step                     | their weights are the same       |
| of one worker in one step and in the next      | their weights are nearly the same |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Sizes whose ratio is smaller are alike.
_LEAST_RATIO = 1.15

#: Pairs without which nothing is said, and standard errors by which b must be above the middle between a mean and a sum.
_LEAST_PAIRS, _ERRORS, _MIDDLE = 6, 2.5, 0.5


@dataclass(frozen=True)
class Batch:
    """A batch that a worker has trained on."""

    worker: int
    step: int
    size: float
    loss: float


@dataclass
class _Fit:
    """The pairs so far: sums over the logarithms of the ratios of sizes (x) and losses (y)."""

    count: int = 0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    last: dict[int, Batch] = field(default_factory=dict)
    """By worker."""
    first: dict[int, Batch] = field(default_factory=dict)
    """By step, that of the worker that told it first."""

    def add(self, one: Batch) -> Batch | None:
        """Take a batch; returns the one that it was compared with last."""
        before = self.last.get(one.worker)
        others = [self.first.setdefault(one.step, one), before if before and before.step == one.step - 1 else None]
        self.last[one.worker] = one
        compared = None
        for other in others:
            if other is not None and other is not one and self._compare(one, other):
                compared = other
        return compared

    def _compare(self, one: Batch, other: Batch) -> bool:
        if one.size <= 0 or other.size <= 0 or not 0 < one.loss / (other.loss or math.inf) < math.inf:
            return False
        x, y = math.log(one.size / other.size), math.log(one.loss / other.loss)
        if abs(x) < math.log(_LEAST_RATIO):
            return False
        self.count, self.xx, self.xy, self.yy = self.count + 1, self.xx + x * x, self.xy + x * y, self.yy + y * y
        return True

    @property
    def grows(self) -> bool:
        """Whether losses grow as sums do, beyond chance."""
        if self.count < _LEAST_PAIRS:
            return False
        exponent = self.xy / self.xx
        variance = max(self.yy - exponent * self.xy, 0.0) / (self.count - 1)
        return exponent - _ERRORS * math.sqrt(variance / self.xx) > _MIDDLE


class LossGrowth:
    """The first batches of one job.

    Args:
        way_out: what a loop with such a loss does.
    """

    def __init__(self, way_out: str) -> None:
        self._way_out = way_out
        self._fits: dict[str, _Fit] = defaultdict(_Fit)
        self._said: set[str] = set()

    def note(self, name: str, batches: Iterable[Batch]) -> str:
        """Take in batches of an optimizer; returns a line, once, if its losses grow with the batch."""
        fit, line = self._fits[name], ""
        for one in batches:
            other = fit.add(one)
            if other is not None and fit.grows and name not in self._said:
                self._said.add(name)
                line = f"losses grow with the batch, as sums over samples do: {_pair(other, one)}. {self._way_out}"
        return line


def _pair(one: Batch, other: Batch) -> str:
    small, large = sorted((one, other), key=lambda batch: batch.size)
    return (
        f"{small.loss:.4g} for {small.size:g} samples (worker {small.worker}, step {small.step}), {large.loss:.4g} for "
        f"{large.size:g} (worker {large.worker}, step {large.step})"
    )
