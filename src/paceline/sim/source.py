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
        seed: seed of the shuffling.
        labels: class of each sample; with these, parts have unlike classes.
        skew: part of the samples that is divided in order of their classes, instead of at random.
    """

    def __init__(
        self, length: int, weights: Sequence[float], seed: int, labels: Indices | None = None, skew: float = 0.0
    ) -> None:
        self._rng = np.random.default_rng([seed, 1])
        order = self._rng.permutation(length)
        sorted_ones = order[: int(skew * length)]
        if labels is not None and len(sorted_ones):
            sorted_ones = sorted_ones[np.argsort(labels[sorted_ones], kind="stable")]
        self._parts = [
            np.concatenate(both)
            for both in zip(_cut(sorted_ones, weights), _cut(order[len(sorted_ones) :], weights), strict=True)
        ]
        self._left: list[Indices] = [np.zeros(0, np.int64) for _ in weights]

    def next(self, worker: int, count: int) -> Indices:
        """Return a worker's next samples, int64."""
        while len(self._left[worker]) < count:
            self._left[worker] = np.concatenate([self._left[worker], self._rng.permutation(self._parts[worker])])
        taken, self._left[worker] = self._left[worker][:count], self._left[worker][count:]
        return taken


def _cut(order: Indices, weights: Sequence[float]) -> list[Indices]:
    return np.split(order, np.cumsum(split_evenly(len(order), weights))[:-1])


class OneQueue:
    """All workers take from one queue of all samples, shuffled anew each time.

    Args:
        length: number of samples.
        seed: seed of the shuffling.
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
