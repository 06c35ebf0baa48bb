"""How much the times of steps vary, what that costs workers that wait for each other, and whether it has changed.

While a job runs, a worker counts over its last rounds, and says it with its heartbeats. What all have counted replaces
the noise of the start only where chance alone would hardly make such a difference (:data:`SURE`): few spikes are
counted in a short time, and a forecast depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

#: Rounds over which a worker counts, and rounds whose median is the time of a step then: speeds may change.
WINDOW, BLOCK = 200, 25

#: Standard errors that count as a difference.
SURE = 4.0

#: Standard error of the logarithm of jitter from one step: a median absolute deviation has 37 % of the efficiency of a
#: standard deviation.
_JITTER_ERROR = math.sqrt(1 / (2 * 0.37))

#: Jitter below this is none.
_LEAST_JITTER = 0.01


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
        """Return the mean time of the slowest of several steps."""
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


@dataclass(frozen=True)
class Counted:
    """The counts of one worker."""

    steps: int = 0
    """0: too few to count."""
    spikes: int = 0
    spike_factor: float = 1.0
    """Mean of the spikes, in medians; 1 without any."""
    jitter: float = 0.0
    """Sigma of the logarithm of the other steps."""


def count(seconds: Sequence[float]) -> Counted:
    """Return the counts of a worker's last steps.

    A step that takes several times the median of the steps around it is a spike. Where a worker has become slower or
    faster for good, the medians before and after differ, and the larger one counts.

    Args:
        seconds: times of the last steps, the newest last; of the oldest and newest :data:`BLOCK` the median counts.
    """
    blocks = len(seconds) // BLOCK
    if blocks < 3:
        return Counted()
    times = np.asarray(seconds[-blocks * BLOCK :], dtype=np.float64).reshape(blocks, BLOCK)
    medians = np.median(times, axis=1)
    around = np.maximum(np.maximum(medians[:-2], medians[2:]), medians[1:-1])
    times = times[1:-1]
    ratios = times / around[:, None]
    spikes = ratios[ratios > SPIKE]
    usual = (times / medians[1:-1, None])[ratios <= SPIKE]
    jitter = NORMAL_MAD * float(np.median(np.abs(np.log(usual)))) if usual.size else 0.0
    return Counted(times.size, spikes.size, float(spikes.mean()) if spikes.size else 1.0, jitter)


def _angle(share: float) -> float:
    return 2 * math.asin(math.sqrt(share))


def noise_now(start: StepNoise, start_steps: int, counted: Sequence[Counted]) -> StepNoise:
    """Return the noise of now.

    Args:
        start: as it was measured before the job began.
        start_steps: from which it was.
        counted: by each worker.
    """
    steps, spikes = sum(one.steps for one in counted), sum(one.spikes for one in counted)
    if not steps:
        return start
    now = start
    error = math.sqrt(1 / start_steps + 1 / steps)
    jitter = median(one.jitter for one in counted if one.steps)
    ratio = max(jitter, _LEAST_JITTER) / max(start.jitter, _LEAST_JITTER)
    if abs(math.log(ratio)) > SURE * _JITTER_ERROR * error:
        now = replace(now, jitter=jitter)
    share = spikes / steps
    # The arcsine of a share's root has the same error for all shares, also where there were no spikes.
    if abs(_angle(share) - _angle(start.spike_share)) > SURE * error:
        factor = sum(one.spikes * one.spike_factor for one in counted) / spikes if spikes else 1.0
        now = replace(now, spike_share=share, spike_factor=factor)
    return now
