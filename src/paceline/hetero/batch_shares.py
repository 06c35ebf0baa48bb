"""How many samples of each global batch a worker computes.

The global batch stays the same with all shares, and when a worker leaves: with gradients weighted by samples, a step
is the same step. Shares by measured speed with lock step are LB-BSP (Chen et al., SoCC 2020): all workers finish
at the same time, and no gradient is stale.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

from paceline.hetero.step_speed import Speed

#: Samples per worker that may be left to give one by one, after the first guess; otherwise a search comes before that.
_FEW = 4

#: New shares are taken when they shorten a step by more than this part. A change of batch sizes costs little, but one
#: in every round would make runs hard to compare.
HYSTERESIS = 0.02


def split_evenly(total: int, weights: Sequence[float]) -> list[int]:
    """Divide ``total`` in proportion to weights; the sum is exact, no part is off by one or more.

    Raises:
        ValueError: no weights, one that is negative or no finite number, or all are 0.
    """
    if not all(0 <= one < math.inf for one in weights) or sum(weights) <= 0:
        raise ValueError(f"weights {list(weights)} cannot divide anything; they must be positive")
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(one) for one in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - exact[index], index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def fastest_split(total: int, speeds: Sequence[Speed], max_batch: Sequence[int | None] = ()) -> list[int]:
    """Divide a global batch so that its slowest part takes as little time as possible; everybody gets one or more.

    Samples of a worker beyond its ``max_batch``, which fit into its memory at once, cost it further passes.

    Raises:
        ValueError: there are fewer samples than workers.
    """
    caps = list(max_batch) or [None] * len(speeds)
    if total < len(speeds):
        raise ValueError(f"a global batch of {total} samples is too small for {len(speeds)} workers")
    parts = _parts(_least_seconds(total, speeds), speeds, caps)
    if not 0 <= total - sum(parts) <= _FEW * len(speeds):
        parts = _parts(_most_seconds(total, speeds, caps), speeds, caps)
    while sum(parts) > total:  # the single samples that every worker has
        parts[parts.index(max(parts))] -= 1
    _give_rest(parts, total - sum(parts), speeds, caps)
    return parts


def _least_seconds(total: int, speeds: Sequence[Speed]) -> float:
    """Return when all would finish together, if samples could be cut and one pass were enough for each."""
    rate = sum(1 / speed.per_sample_s for speed in speeds)
    return (total + sum(speed.fixed_s / speed.per_sample_s for speed in speeds)) / rate


def _most_seconds(total: int, speeds: Sequence[Speed], caps: Sequence[int | None]) -> float:
    """Return the longest time in which the workers do at most so many samples, by bisection."""
    low, high = 0.0, max(speed.seconds(total, cap) for speed, cap in zip(speeds, caps, strict=True))
    for _ in range(50):
        middle = (low + high) / 2
        if sum(_parts(middle, speeds, caps)) <= total:
            low = middle
        else:
            high = middle
    return low


def _parts(seconds: float, speeds: Sequence[Speed], caps: Sequence[int | None]) -> list[int]:
    return [max(1, speed.samples_within(seconds, cap)) for speed, cap in zip(speeds, caps, strict=True)]


def _give_rest(parts: list[int], rest: int, speeds: Sequence[Speed], caps: Sequence[int | None]) -> None:
    """Give the remaining samples one by one to the workers that they delay least."""
    after = [(speed.seconds(parts[i] + 1, caps[i]), i) for i, speed in enumerate(speeds)]
    heapq.heapify(after)
    for _ in range(rest):
        _, index = heapq.heappop(after)
        parts[index] += 1
        heapq.heappush(after, (speeds[index].seconds(parts[index] + 1, caps[index]), index))


def step_seconds(parts: Sequence[int], speeds: Sequence[Speed], max_batch: Sequence[int | None] = ()) -> float:
    """Return how long the slowest worker computes."""
    caps = list(max_batch) or [None] * len(speeds)
    return max(speed.seconds(part, cap) for part, speed, cap in zip(parts, speeds, caps, strict=True))


def columns_of(samples: Mapping[int, int], left: int, least: int = 1) -> dict[int, tuple[int, int]]:
    """Return which columns of a global batch are each worker's: they lie side by side in order of rank.

    Args:
        samples: samples of a whole global batch, by worker.
        left: samples that are left; a batch that is not whole is divided in like proportion, and everybody gets one or
            more.
        least: no worker gets fewer, if there are as many for each.
    """
    parts = list(samples.values())
    if left < sum(parts):
        parts = [1 + part for part in split_evenly(max(0, left - len(parts)), parts)]
    while min(parts) < min(least, sum(parts) // len(parts)):
        parts[parts.index(min(parts))] += 1
        parts[parts.index(max(parts))] -= 1
    stops = list(itertools.accumulate(parts))
    return {worker: (stop - part, stop) for worker, part, stop in zip(samples, parts, stops, strict=True)}


class Shares:
    """The shares of a job: fixed fractions, or following measured speeds.

    ======================  ===========================================================
    event                   new shares
    ======================  ===========================================================
    ``revise(speeds)``      the best ones, if they shorten a step by more than the hysteresis
    ``leave(worker)``       its share goes to the others: by speed if that is known, else in proportion
    ``join(worker)``        it gets an equal share; the others' go on in proportion, until its speed is known
    ======================  ===========================================================

    The sum of all shares is the global batch at all times. Every worker that feeds its own copy the same events has
    the same shares.

    Args:
        global_batch: samples of all workers together.
        fractions: initial weight per worker, in order of rank; for equal shares ``[1] * num_workers``.
        max_batch: largest batch that fits into each worker's memory; None: no limit. The list is read at each revision.

    Raises:
        ValueError: the weights cannot divide the batch, or it has fewer samples than there are workers.
    """

    def __init__(self, global_batch: int, fractions: Sequence[float], max_batch: Sequence[int | None] = ()) -> None:
        if global_batch < len(fractions):
            raise ValueError(f"a global batch of {global_batch} samples is too small for {len(fractions)} workers")
        self.global_batch = global_batch
        self._caps = max_batch or [None] * len(fractions)
        self._speeds: dict[int, Speed] = {}
        self.samples = dict(enumerate(split_evenly(global_batch, fractions)))
        """Samples of each global batch, by worker; only workers that have not left."""

    def revise(self, speeds: Mapping[int, Speed]) -> bool:
        """Follow measured speeds; returns whether the shares have changed. They wait until all speeds are known."""
        self._speeds |= speeds
        if self._speeds.keys() < self.samples.keys():
            return False
        best = self._best()
        if not self._time(best) < (1 - HYSTERESIS) * self._time(self.samples):
            return False
        self.samples = best
        return True

    def leave(self, worker: int) -> None:
        """Give the share of a worker that has left or died to the others; once, if it is said again.

        Raises:
            ValueError: no worker is left.
        """
        if worker not in self.samples:
            return
        if len(self.samples) == 1:
            raise ValueError(f"worker {worker} was the last one; nobody is left to take its share")
        del self.samples[worker]
        self._speeds.pop(worker, None)
        if self._speeds.keys() >= self.samples.keys():
            self.samples = self._best()
        else:
            parts = split_evenly(self.global_batch, list(self.samples.values()))
            self.samples = dict(zip(self.samples, parts, strict=True))

    def join(self, worker: int) -> None:
        """Give a share to a worker that has joined; once, if it is said again. Its speed is not known."""
        if worker in self.samples:
            return
        weights = self.samples | {worker: self.global_batch / len(self.samples)}
        workers = sorted(weights)
        parts = split_evenly(self.global_batch - len(workers), [weights[one] for one in workers])
        self.samples = {one: 1 + part for one, part in zip(workers, parts, strict=True)}
        self._speeds.pop(worker, None)

    def stand(self, samples: Mapping[int, int], speeds: Mapping[int, Speed]) -> None:
        """Take the shares, and the speeds behind them, of a copy that another worker feeds."""
        self.samples, self._speeds = dict(samples), {one: speeds[one] for one in samples if one in speeds}

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: it does not.
        """
        assert sum(self.samples.values()) == self.global_batch, "the shares do not make up the global batch"
        assert list(self.samples) == sorted(self.samples), "the workers are not in order"

    def _best(self) -> dict[int, int]:
        workers = list(self.samples)
        parts = fastest_split(
            self.global_batch, [self._speeds[one] for one in workers], [self._caps[one] for one in workers]
        )
        return dict(zip(workers, parts, strict=True))

    def _time(self, samples: Mapping[int, int]) -> float:
        return max(self._speeds[one].seconds(number, self._caps[one]) for one, number in samples.items())
