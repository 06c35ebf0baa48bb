"""How fast a worker computes: a + b * samples seconds per step, fitted from the steps it has made.

A step takes a fixed time and a time per sample. Both follow from steps with unlike numbers of samples. As long as all
steps had about the same number, the time counts as proportional to the samples: that is right at this number, and the
first step with another one corrects it.

Measurements change for two reasons, and the number of samples tells them apart:

- *The worker's speed changes*: several steps in a row take another time than steps of like size did. Earlier
  measurements are multiplied by the change, so that the ratio of fixed time and time per sample survives.
- *The number of samples changes*: steps of a size that was never seen do not fit. They are new knowledge, no change.

Single slow steps (a page cache that is cold, a neighbour's job) move neither: everything is a median.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

#: Steps in a row that must agree before they count as a change of speed.
STREAK = 3

#: Change that counts: steps that take 1.3 times as long, or 1 / 1.3. Of a steady worker with 10 % of noise one step in
#: 230 is so slow, and three in a row are once in 12 million. Smaller changes are followed when half of the window shows
#: them.
CHANGE = 1.3

#: Sizes that differ by less than this share say nothing about the time per sample.
_DISTINCT = 0.2

#: Largest part of a step's time that counts as fixed. Without a limit, a device that takes the same time for every
#: size would be asked for infinite batches.
_MOST_FIXED = 0.95

_Values = NDArray[np.float64]


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
    """Fits a worker's speed to its last steps.

    Args:
        window: number of steps that are looked at.
    """

    def __init__(self, window: int = 25) -> None:
        self._window = window
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._new: list[tuple[float, float]] = []
        """Steps that are looked at when the speed is asked for: a step waits for nothing."""
        self._fit: Speed | None = None

    def __len__(self) -> int:
        """Number of steps that are looked at."""
        return min(self._window, len(self._steps) + len(self._new))

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
        if self._fit is None and self._steps:
            samples, seconds = np.array(self._steps, dtype=np.float64).T
            self._fit = _fit(samples, seconds)
        return self._fit

    def _look(self) -> None:
        for step in self._new:
            self._steps.append(step)
            self._follow_change()
            self._fit = None
        self._new.clear()

    def _follow_change(self) -> None:
        """When the last steps agree on a change of speed, multiply earlier measurements by it."""
        known = len(self._steps) - STREAK
        if known < 1:
            return
        samples, seconds = np.array(self._steps, dtype=np.float64).T
        before, sizes = samples[:known], samples[known:]
        if sizes.min() < before.min() / (1 + _DISTINCT) or sizes.max() > before.max() * (1 + _DISTINCT):
            return  # sizes that were never seen
        expected = _fit(before, seconds[:known])
        ratios = np.array([one / expected.seconds(size) for size, one in zip(sizes, seconds[known:], strict=True)])
        if ratios.min() > CHANGE or ratios.max() < 1 / CHANGE:
            change = float(np.median(ratios))
            older = [(size, one * change) for size, one in islice(self._steps, known)]
            newer = list(islice(self._steps, known, None))
            self._steps.clear()
            self._steps.extend(older + newer)


def _fit(samples: _Values, seconds: _Values) -> Speed:
    """Theil and Sen: the median slope of all pairs of steps with unlike sizes, then the median offset.

    One or two steps of another size prove nothing: one of them may be an outlier. Until there are more, times count as
    proportional to samples, which is right at the last size.
    """
    large = int((samples > (samples.min() + samples.max()) / 2).sum())
    if min(large, len(samples) - large) < STREAK:
        return _proportional(samples, seconds)
    first, second = np.triu_indices(len(samples), 1)
    apart = samples[second] - samples[first]
    useful = np.abs(apart) >= _DISTINCT * samples.max()
    if not useful.any():
        return _proportional(samples, seconds)
    size = float(np.median(samples))
    slope = float(np.median((seconds[second] - seconds[first])[useful] / apart[useful]))
    level = float(np.median(seconds - slope * samples)) + slope * size
    if level <= 0:
        return Speed(0.0, float(np.median(seconds / samples)))
    slope = min(max(slope, (1 - _MOST_FIXED) * level / size), level / size)
    return Speed(level - slope * size, slope)


def _proportional(samples: _Values, seconds: _Values) -> Speed:
    """Return the median time per sample of the steps that have the size of the last one."""
    near = np.abs(samples - samples[-1]) <= _DISTINCT * samples[-1]
    return Speed(0.0, float(np.median(seconds[near] / samples[near])))
