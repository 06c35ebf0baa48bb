"""The same trials in the simulator, and learning rates tuned there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.unequal.modes import ALL_MODES, BATCH, JITTER, Kind, Machines
from benchmarks.unequal.trial import EVALUATE_S, TARGET, Outcome, Trial
from benchmarks.unequal.worker import MODEL_ELEMENTS
from paceline.sim import SimulatedCluster, SimulatedTraining, SimulatedWorker, simulate
from paceline.sim.problem import Digits

#: Of the digits' network, float32.
MODEL_BYTES = 4 * MODEL_ELEMENTS
#: The first rate that is tried, below every mode's best: too large ones are all alike. Each next one is twice as large.
FIRST_RATE = 0.05


@dataclass(frozen=True)
class Service:
    """What an exchange takes, in seconds: a message, the sum of one push, an update."""

    latency_s: float = 0.001
    merge_s: float = 0.0005
    update_s: float = 0.0005


def cluster(machines: Machines, service: Service, **changes: Any) -> SimulatedCluster:
    """Return the machines as the simulator takes them; ``changes`` are fields of its cluster."""
    usual = SimulatedCluster(
        tuple(SimulatedWorker(speed) for speed in machines.speeds),
        jitter=JITTER,
        latency_s=service.latency_s,
        merge_s=service.merge_s,
        update_s=service.update_s,
        model_bytes=MODEL_BYTES,
    )
    return replace(usual, **changes)


def run(trial: Trial, service: Service, on: SimulatedCluster | None = None) -> Outcome:
    """Return what a trial gives in the simulator.

    Args:
        trial: the job.
        service: what exchanges take.
        on: other machines than the benchmark's.
    """
    machines, mode = trial.machines, ALL_MODES[trial.mode]
    target = TARGET if trial.to_target else None
    plan = SimulatedTraining(
        mode.policy(machines), mode.shares, BATCH, lr=trial.lr, seconds=trial.seconds, target=target,
        evaluate_s=EVALUATE_S, seed=trial.seed,
    )  # fmt: skip
    result = simulate(on or cluster(machines, service), plan, _problem(trial.seed))
    ages = result.staleness
    return Outcome(
        seconds=result.seconds,
        batches_per_s=sum(result.rounds) / result.seconds,
        samples_per_s=result.samples_per_s,
        staleness=sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        mass_per_s=result.step_mass / trial.lr / result.seconds,
        curve=tuple(result.curve),
    )


@functools.cache
def _problem(seed: int) -> Digits:
    return Digits(seed=seed)


def score(outcomes: Sequence[Outcome]) -> float:
    """Return the median time to the target; jobs that never reached it are worse, the less accurate the worse."""
    never = 1e6
    return median(min(one.reached_s(TARGET), never * (2 - one.final)) for one in outcomes)


def climb(first: float, score_of: Callable[[float], float]) -> float:
    """Return a rate that is better than half of it and than twice of it, from ``first`` on.

    Args:
        first: rate to begin with.
        score_of: of a rate; less is better.
    """
    scores: dict[float, float] = {}

    def scored(rate: float) -> float:
        if rate not in scores:
            scores[rate] = score_of(rate)
        return scores[rate]

    best = first
    for factor in (2.0, 0.5):
        while scored(best * factor) < scored(best):
            best *= factor
    return best


def tuned(
    mode: str,
    seeds: Sequence[int],
    seconds: float,
    service: Service,
    on: SimulatedCluster | None = None,
    kind: Kind = "classes",
) -> float:
    """Return the best rate of a mode in the simulator.

    Args:
        mode: its name.
        seeds: of the jobs whose median counts.
        seconds: time that a job has to reach the target.
        service: what exchanges take.
        on: other machines than the benchmark's.
        kind: of the benchmark's machines.
    """

    def score_of(rate: float) -> float:
        return score([run(Trial(mode, rate, seed, seconds, kind=kind), service, on) for seed in seeds])

    return climb(FIRST_RATE, score_of)
