"""Variation of the times of steps, and its cost for workers that wait for each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

_Values = NDArray[np.float64]

#: A step that takes so many times as long as the worker's median is a spike.
SPIKE = 3.0

#: Spikes are believed when they are at least so many, and this part of all steps: one pause proves nothing.
_FEWEST_SPIKES, _RAREST_SPIKES = 3, 0.01

#: Standard deviation of a normal distribution, in median absolute deviations.
NORMAL_MAD = 1.4826


@dataclass(frozen=True)
class StepNoise:
    """A step takes its worker's median time, times log-normal jitter, and now and then many times as long."""

    jitter: float = 0.0
    """Sigma of the logarithm."""
    spike_share: float = 0.0
    """Part of all steps that are spikes."""
    spike_factor: float = 1.0
    """How many times as long a spike takes."""

    @property
    def mean(self) -> float:
        """Mean time of a step, in medians."""
        return math.exp(self.jitter**2 / 2) * (1 + self.spike_share * (self.spike_factor - 1))

    @classmethod
    def of(cls, ratios: Sequence[float]) -> StepNoise:
        """Return the noise of measured steps of all workers: each one's time over its worker's median for such a step.

        Raises:
            ValueError: there are none.
        """
        if not ratios:
            raise ValueError("no steps were measured")
        spikes = [one for one in ratios if one > SPIKE]
        usual = [abs(math.log(one)) for one in ratios if one <= SPIKE]
        share = len(spikes) / len(ratios)
        jitter = NORMAL_MAD * median(usual) if usual else 0.0
        if len(spikes) < _FEWEST_SPIKES or share < _RAREST_SPIKES:
            return cls(jitter)
        return cls(jitter, share, math.fsum(spikes) / len(spikes))

    def slowest(self, seconds: Sequence[float]) -> float:
        """Return the mean time of the slowest of several steps.

        Args:
            seconds: median time of each.
        """
        times = np.asarray(seconds, dtype=np.float64)
        if len(times) == 1:
            return float(times[0]) * self.mean
        if self.jitter < 1e-3 and not self.spike_share:
            return float(times.max())
        widest = math.exp(5 * self.jitter)
        grid = np.linspace(0, float(times.max()) * widest * max(1.0, self.spike_factor), 2001)
        middles = (grid[1:] + grid[:-1]) / 2
        within = np.ones_like(middles)
        for one, count in zip(*np.unique(times, return_counts=True), strict=True):
            within *= self._within(middles / one) ** count
        return float((1 - within).sum() * (grid[1] - grid[0]))

    def _within(self, ratios: _Values) -> _Values:
        """Return the probability that a step takes at most so many medians."""
        logs = np.log(ratios)
        usual = _normal(logs / max(self.jitter, 1e-3))
        if not self.spike_share:
            return usual
        spikes = _normal((logs - math.log(self.spike_factor)) / max(self.jitter, 1e-3))
        return (1 - self.spike_share) * usual + self.spike_share * spikes


def _normal_table() -> tuple[_Values, _Values]:
    points = np.linspace(-8, 8, 8001)
    return points, np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in points])


#: A scheduler forecasts while a job runs: interpolation takes a fiftieth of the time, and is right to 1e-6.
_NORMAL_TABLE = _normal_table()


def _normal(values: _Values) -> _Values:
    """Return the standard normal distribution function."""
    return np.interp(values, *_NORMAL_TABLE)
