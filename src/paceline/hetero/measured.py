"""Times of a job's machines, and how they follow from steps in lock step.

The time of a step of n samples follows from steps of two sizes (:func:`sizes`). The time that all workers wait in a
round, the slowest one too, is the exchange: messages and the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from paceline.hetero.step_noise import StepNoise
from paceline.hetero.step_speed import Speed, SpeedMeter

#: Rounds in lock step that are measured: half of them with a quarter of the batch.
ROUNDS = 24


class WorkerRound(NamedTuple):
    """A round of a worker."""

    samples: float
    seconds: float
    """That it computed."""
    waited_s: float
    """That it then waited for the answer."""


@dataclass(frozen=True)
class Measured:
    """Times of a job's machines."""

    workers: tuple[Speed, ...]
    """Median time of a step of n samples, by rank, without waits and spikes."""
    batch: int = 1
    """Samples of a step of each worker, with equal shares."""
    noise: StepNoise = field(default_factory=StepNoise)
    exchange_s: float = 0.0
    """Part of a round in lock step that is no computation and no wait for slower workers: messages and the update."""
    update_s: float = 0.0
    """The servers' part of it for the optimizer."""
    hands_out: bool = True
    """Whether samples go to any free worker. Otherwise each worker has data of its own."""

    @property
    def seconds(self) -> list[float]:
        """Median time of each worker's step."""
        return [speed.seconds(self.batch) for speed in self.workers]

    @property
    def push_s(self) -> float:
        """Time of one push and its answer."""
        return max(0.0, self.exchange_s - self.update_s) / len(self.workers)


def sizes(batch: int, rounds: int = ROUNDS) -> list[int]:
    """Return the batch of each round that is measured."""
    return [batch] * (rounds - rounds // 2) + [max(1, batch // 4)] * (rounds // 2)


def measured_of(
    steps: Sequence[Sequence[WorkerRound]], batch: int, update_s: float = 0.0, *, hands_out: bool = True
) -> Measured:
    """Return the times that follow from rounds in lock step.

    Args:
        steps: each worker's steps of the same rounds, in order of rank.
        batch: samples of a step of each worker, with equal shares.
        update_s: seconds of the servers' optimizer in a round, as far as known.
        hands_out: whether samples go to any worker that is free.

    Raises:
        ValueError: a worker has no steps.
    """
    if not steps or not all(steps):
        raise ValueError("no steps were measured of some workers")
    speeds = [speed_of(one) for one in steps]
    ratios = [
        step.seconds / speed.seconds(step.samples)
        for speed, one in zip(speeds, steps, strict=True)
        for step in _settled(one)
    ]
    exchange_s = median(min(step.waited_s for step in round) for round in zip(*steps, strict=False))
    return Measured(tuple(speeds), batch, StepNoise.of(ratios), max(exchange_s, update_s), update_s, hands_out)


def _settled(steps: Sequence[WorkerRound]) -> Sequence[WorkerRound]:
    """Leave out the first step of each size; all steps, if none are left.

    A step is measured from push to push. The work of a worker after its push belongs to the batch before: so the
    first step of another size is partly one of the old size.
    """
    return [step for before, step in pairwise(steps) if step.samples == before.samples] or steps


def speed_of(steps: Sequence[WorkerRound]) -> Speed:
    """Return the speed that a worker's steps show, one or more."""
    meter = SpeedMeter(window=len(steps))
    for step in _settled(steps):
        meter.add(step.samples, step.seconds)
    speed = meter.speed()
    assert speed is not None
    return speed
