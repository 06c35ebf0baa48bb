"""Noise of a running job: how much the times of steps vary now, and whether that differs from the first measurements.

A worker counts over its last rounds, and says it with its heartbeats. The counts of all replace the noise of the start
only where chance alone would hardly make such a difference (:data:`SURE`): few spikes are counted in a short
time, and a forecast depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from paceline.hetero.step_noise import NORMAL_MAD, SPIKE, StepNoise

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
    """Return the counts in the last steps of a worker.

    A step that takes several times the median of the steps around it is a spike. Where a worker has become slower or
    faster for good, the medians before and after differ, and the larger one counts.

    Args:
        seconds: times of the last steps, the newest last; the oldest and newest :data:`BLOCK` count as a median only.
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
