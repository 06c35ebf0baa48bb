"""Which samples a simulated worker trains on in its next round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.hetero import split_evenly

Indices = NDArray[np.int64]


class OwnData:
    """Every worker goes through a part of its own, shuffled anew each time.

    Args:
        length: samples.
        weights: size of the parts, per worker.
        seed: of the shuffling.
    """

    def __init__(self, length: int, weights: Sequence[float], seed: int) -> None:
        self._rng = np.random.default_rng([seed, 1])
        ends = np.cumsum(split_evenly(length, weights))[:-1]
        self._parts = np.split(self._rng.permutation(length), ends)
        self._left: list[Indices] = [np.zeros(0, np.int64) for _ in weights]

    def next(self, worker: int, count: int) -> Indices:
        """Return a worker's next samples, int64."""
        while len(self._left[worker]) < count:
            self._left[worker] = np.concatenate([self._left[worker], self._rng.permutation(self._parts[worker])])
        taken, self._left[worker] = self._left[worker][:count], self._left[worker][count:]
        return taken


class OneQueue:
    """All workers take from one queue of all samples, shuffled anew each time.

    Args:
        length: samples.
        seed: of the shuffling.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._queue = OwnData(length, [1.0], seed)

    def next(self, worker: int, count: int) -> Indices:
        """Return the next samples, int64."""
        return self._queue.next(0, count)


class NoData:
    """No samples, for jobs that learn nothing."""

    def next(self, worker: int, count: int) -> Indices:
        """Return no samples."""
        return np.zeros(0, np.int64)
