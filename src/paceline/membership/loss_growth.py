"""Finds losses that grow with the batch: they are sums over samples, where means are wanted. Pure.

In one step all workers have the same weights. So losses that are means over samples differ by chance only, and sums as
the sizes of batches do. The batches of many steps tell the exponent b in ``loss = a * size ** b``, where each step has
an ``a`` of its own: 0 for means, 1 for sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: Steps whose largest batch is not larger than the smallest by this factor tell nothing.
_LEAST_RATIO = 1.25

#: Batches, beyond one in each step, without which nothing is said.
_LEAST_BATCHES = 14

#: What b of sums lies between, and by how much more likely sums must be than means: a logarithm.
_OF_SUMS, _LIKELIER = (0.75, 1.4), 12.0

#: (size, loss) by worker.
Batches = Mapping[int, tuple[float, float]]


class LossGrowth:
    """The batches of one optimizer."""

    def __init__(self) -> None:
        self._batches = 0
        self._xx = self._xy = self._yy = 0.0
        """Sums over the logarithms of sizes (x) and losses (y), less their means in the same step."""

    def note(self, batches: Batches) -> str:
        """Take in the batches of one step; returns the largest and the smallest, if losses grow as sums do."""
        found = [(size, loss, rank) for rank, (size, loss) in batches.items() if size > 0 and 0 < loss < math.inf]
        smallest, largest = min(found, default=None), max(found, default=None)
        if smallest is None or largest is None or largest[0] < _LEAST_RATIO * smallest[0]:
            return ""
        x, y = _centred([size for size, _, _ in found]), _centred([loss for _, loss, _ in found])
        self._batches += len(found) - 1
        self._xx, self._yy = self._xx + _dot(x, x), self._yy + _dot(y, y)
        self._xy += _dot(x, y)
        return f"{_text(*smallest)} and {_text(*largest)}" if self._grows else ""

    @property
    def _grows(self) -> bool:
        exponent = self._xy / self._xx
        variance = max(self._yy - exponent * self._xy, 0.0) / self._batches
        is_of_sums = self._batches >= _LEAST_BATCHES and _OF_SUMS[0] < exponent < _OF_SUMS[1]
        return is_of_sums and (exponent - 0.5) * self._xx > _LIKELIER * variance


def _centred(values: Sequence[float]) -> list[float]:
    logarithms = list(map(math.log, values))
    mean = sum(logarithms) / len(logarithms)
    return [one - mean for one in logarithms]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(one, other, strict=True))


def _text(size: float, loss: float, rank: int) -> str:
    return f"{loss:.4g} for {size:g} samples on worker {rank}"
