"""How fast a worker computes: a + b * samples seconds per step, fitted from the steps it has made.

A step takes a fixed time and a time per sample. Their ratio, the *shape*, is a property of model and machine: it is
learned while the worker takes steps of unlike sizes, and remembered when all steps have about the same size again, and
when the worker's speed changes. Until then the time counts as proportional to the samples: that is right at this size,
and the first steps of another one correct it. The level follows the last steps.

Measurements change for two reasons, and the number of samples tells them apart:

- *The worker's speed changes*: several steps in a row take another time than steps of like size did. Earlier
  measurements are forgotten; the shape survives.
- *The number of samples changes*: steps of a size that was never seen do not fit. They are new knowledge, no change.

Single slow steps (a page cache that is cold, a neighbour's job) move neither: everything is a median, or the mean of
the middle half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median_low

import numpy as np
from numpy.typing import NDArray

#: Steps in a row that must agree before they count as a change of speed.
STREAK = 3

#: Change that counts: steps that take 1.3 times as long, or 1 / 1.3. Of a steady worker with 10 % of noise one step in
#: 230 is so slow, and three in a row are once in 12 million. Smaller changes are followed when half of the window shows
#: them.
CHANGE = 1.3

#: A size is new if it is beyond those that were seen by more than this part. Two steps whose sizes differ by less than
#: half of it say nothing about the time per sample.
_DISTINCT = 0.2

#: Largest part of a step's time that counts as fixed. Without a limit, a device that takes the same time for every
#: size would be asked for infinite batches.
_MOST_FIXED = 0.95

#: The assumption before sizes differ: all of a step's time depends on its samples, give or take this part of it.
_DOUBT = 0.3

#: Noise of a step that is believed, as a part of its time, and how many measured steps this counts as.
_NOISE, _NOISE_STEPS = 0.05, 4

#: Part of the knowledge of the shape that a window of steps leaves: the newest ones count most.
_KEPT = 0.8

#: Knowledge from steps stands alone if it is so many times the former knowledge.
_FAR_MORE = 50

#: A shape that is uncertain to more than this part of a step's time is not used to compare steps of unlike sizes.
_VAGUE = 0.15

#: Steps that are looked at unless somebody says otherwise, and all pairs of them: those of the first n come first.
_WINDOW = 25
_LATER, _EARLIER = np.tril_indices(_WINDOW, -1)

_Steps = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Speed:
    """A step of n samples takes ``fixed_s + per_sample_s * n`` seconds."""

    fixed_s: float
    per_sample_s: float

    def seconds(self, samples: float, max_batch: int | None = None) -> float:
        """Return the time of a step.

        Args:
            samples: number of samples of the step; 0 takes no time.
            max_batch: samples that fit into memory at once. More are computed in several passes, each with its own
                fixed time, and their gradients are accumulated.
        """
        if samples <= 0:
            return 0.0
        passes = 1 if max_batch is None else -(-samples // max_batch)
        return self.fixed_s * passes + self.per_sample_s * samples

    def samples_within(self, seconds: float, max_batch: int | None = None) -> int:
        """Return the largest number of samples whose step takes at most so many seconds."""
        if max_batch is None:
            return max(0, _whole((seconds - self.fixed_s) / self.per_sample_s))
        full = _whole(seconds / self.seconds(max_batch))
        rest = (seconds - full * self.seconds(max_batch) - self.fixed_s) / self.per_sample_s
        return full * max_batch + min(max(0, _whole(rest)), max_batch)

    def times(self, factor: float) -> Speed:
        """Return the speed of a worker that takes ``factor`` times as long."""
        return Speed(self.fixed_s * factor, self.per_sample_s * factor)


def _whole(number: float) -> int:
    return int(number * (1 + 1e-12) + 1e-9)  # rounding must not cost a sample that just fits


class SpeedMeter:
    """Fits a worker's speed to its last steps."""

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._new: list[tuple[float, float]] = []
        """Steps that are looked at when the speed is asked for: a step waits for nothing."""
        self._before = Shape(0.0, _DOUBT**-2)
        """The knowledge of the shape from the steps before the current block; no step counts twice."""
        self._block = 0
        self._shape = self._before

    def add(self, samples: float, seconds: float) -> None:
        """Note a step: the time of its computation alone, without waits for others.

        Raises:
            ValueError: no samples, or no time.
        """
        if samples <= 0 or seconds <= 0:
            raise ValueError(f"a step of {samples} samples in {seconds} s is not a measurement; both must be positive")
        self._new.append((samples, seconds))
        if len(self._new) == self._window:
            self._look()

    def speed(self) -> Speed | None:
        """Return the fit, or None before the first step."""
        self._look()
        if not self._steps:
            return None
        steps = self._steps if self._shape.known > _VAGUE**-2 else _near_last(self._steps)
        per_sample_s = _per_sample(steps, self._shape)
        return Speed(self._shape.samples * per_sample_s, per_sample_s)

    def _look(self) -> None:
        for step in self._new:
            self._steps.append(step)
            self._block += 1
            self._forget_before_change()
            self._shape = self._before.after(list(self._steps)[-self._block :])
            if self._block == self._window:
                self._end_block(0)
        self._new.clear()

    def _forget_before_change(self) -> None:
        """When the last steps agree on a change of speed, forget those before it."""
        known = len(self._steps) - STREAK
        if known < 1:
            return
        before, last = list(islice(self._steps, known)), list(islice(self._steps, known, None))
        sizes = [size for size, _ in before]
        least, most = min(sizes) / (1 + _DISTINCT), max(sizes) * (1 + _DISTINCT)
        if any(not least <= size <= most for size, _ in last):
            return  # sizes that were never seen
        expected = _per_sample(before, self._shape)
        ratios = [seconds / (expected * (self._shape.samples + size)) for size, seconds in last]
        if min(ratios) > CHANGE or max(ratios) < 1 / CHANGE:
            if self._block > STREAK:
                self._shape = self._before.after(before[STREAK - self._block :])
            self._steps = deque(last, self._window)
            self._end_block(STREAK)

    def _end_block(self, steps: int) -> None:
        """Begin a block of steps with those that are there already."""
        self._before, self._block = Shape(self._shape.samples, self._shape.known * _KEPT), steps


@dataclass(frozen=True)
class Shape:
    """The ratio of a step's fixed time and its time per sample.

    Attributes:
        samples: the number of samples that take as long as the fixed time.
        known: how well: 1 / variance of the part of a step's time that depends on its samples.
    """

    samples: float
    known: float

    def after(self, steps: _Steps) -> Shape:
        """Return the shape that is known after further steps, which tell more the more their sizes differ."""
        mean = fmean([size for size, _ in steps])  # of a list: fmean counts what a generator yields, one by one
        spread = sum((size / mean - 1) ** 2 for size, _ in steps)
        if not _is_certain(steps, mean):
            return self
        part, noise = _sample_part(steps, mean)
        count = len(steps)
        noise_squared = (count * noise**2 + _NOISE_STEPS * _NOISE**2) / (count + _NOISE_STEPS)
        told = spread / noise_squared  # of a slope, as in a regression
        if told > _FAR_MORE * self.known:
            return Shape(mean / part - mean, told)
        both = (told * part + self.known * mean / (self.samples + mean)) / (told + self.known)
        return Shape(mean / both - mean, told + self.known)


def _per_sample(steps: _Steps, shape: Shape) -> float:
    """Return the time per sample of steps with a shape: the mean of their middle half, which outliers do not move."""
    found = sorted(seconds / (shape.samples + size) for size, seconds in steps)
    out = (len(found) + 1) // 4
    return fmean(found[out : len(found) - out])


def _near_last(steps: _Steps) -> _Steps:
    size = steps[-1][0]
    return [one for one in steps if abs(one[0] - size) <= _DISTINCT * size]


def _is_certain(steps: _Steps, mean: float) -> bool:
    """Return whether there are two large and two small steps that agree with their like: one may be an outlier."""
    least, most = min(steps)[0], max(steps)[0]
    if most - least < _DISTINCT / 2 * mean:
        return False
    large = [seconds / size for size, seconds in steps if size > (least + most) / 2]
    small = [seconds / size for size, seconds in steps if size <= (least + most) / 2]
    return all(sum(one < CHANGE * median_low(side) for one in side) > 1 for side in (large, small))


def _sample_part(steps: _Steps, mean: float) -> tuple[float, float]:
    """Return the part of a step of mean size that depends on its samples, and the noise of a step, by Theil and Sen.

    The median slope of all pairs of steps with unlike sizes, then the median offset.
    """
    samples, seconds = np.array(steps, dtype=np.float64).T
    later, earlier = _pairs(len(samples))
    apart = samples[later] - samples[earlier]
    useful = np.abs(apart) >= _DISTINCT / 2 * mean
    slope = _median((seconds[later] - seconds[earlier])[useful] / apart[useful])
    offset = _median(seconds - slope * samples)
    level = offset + slope * mean
    if level <= 0:
        return 1.0, 1.0
    noise = 1.5 * _median(np.abs(seconds - slope * samples - offset)) / level
    return min(max(slope * mean / level, 1 - _MOST_FIXED), 1.0), noise


def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if count > _WINDOW:
        return np.tril_indices(count, -1)
    pairs = count * (count - 1) // 2
    return _LATER[:pairs], _EARLIER[:pairs]


def _median(values: NDArray[np.float64]) -> float:
    """Return what ``np.median`` does for finite numbers, in less time: steps of workers wait for it."""
    values = np.sort(values)
    return float(values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
