"""The three columns: one rate for all modes, each mode's own, and rates of equal step mass."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.unequal import simulated
from benchmarks.unequal.modes import MODES, Kind
from benchmarks.unequal.real import Runner
from benchmarks.unequal.simulated import Service, climb, score, tuned
from benchmarks.unequal.trial import Outcome, Trial, mean

#: Of the jobs that find rates; those that are reported have others.
TUNING_SEEDS = (100, 101, 102)
#: Rates are tried for so much longer than the simulator's best rate takes.
PATIENCE = 1.5


@dataclass(frozen=True)
class Setup:
    """How much is run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    same_lr: float = 0.1
    same_s: float = 300.0
    """End of a job at the rate of all modes."""
    tuned_s: float = 45.0
    """Length of a job at its mode's own rate: it does not end at the target, so final accuracies are comparable."""
    simulated_s: float = 90.0
    """End of a simulated job that is to find a rate."""
    confirms: bool = True
    """Whether the simulator's rates are tried against both neighbours on real processes."""
    per_class: int = 4
    modes: tuple[str, ...] = tuple(MODES)
    kind: Kind = "classes"
    """Of the machines."""


@dataclass(frozen=True)
class Rates:
    """A mode's learning rates."""

    simulated: float
    """The simulator's best."""
    own: float
    """The best on real processes."""
    equal_mass: float
    """With the step mass per second of lock step at its own rate."""


Column = dict[str, list[Outcome]]


def simulated_rates(setup: Setup) -> dict[str, float]:
    """Return the simulator's best rate of each mode."""
    find = partial(tuned, seeds=TUNING_SEEDS, seconds=setup.simulated_s, service=Service(), kind=setup.kind)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(setup.modes, pool.map(find, setup.modes), strict=True))


def confirmed(setup: Setup, runner: Runner, found: dict[str, float]) -> dict[str, float]:
    """Return for each mode the rate that beats both neighbours on real processes, from the simulator's on."""
    if not setup.confirms:
        return found
    trials = {mode: partial(_tuning, setup, mode, _patience(setup, mode, rate)) for mode, rate in found.items()}
    runner.run([one for mode, rate in found.items() for near in (1, 2, 0.5) for one in trials[mode](near * rate)])
    scores = {mode: partial(_score, runner, trials_of) for mode, trials_of in trials.items()}
    return {mode: climb(rate, scores[mode]) for mode, rate in found.items()}


def _score(runner: Runner, trials_of: Callable[[float], list[Trial]], rate: float) -> float:
    return score(runner.run(trials_of(rate)))


def _tuning(setup: Setup, mode: str, seconds: float, rate: float) -> list[Trial]:
    return [Trial(mode, rate, seed, seconds, per_class=setup.per_class, kind=setup.kind) for seed in TUNING_SEEDS]


def _patience(setup: Setup, mode: str, rate: float) -> float:
    takes = score([simulated.run(one, Service()) for one in _tuning(setup, mode, setup.simulated_s, rate)])
    return float(math.ceil(min(PATIENCE * takes, setup.simulated_s)))


def same_rate(setup: Setup, runner: Runner) -> Column:
    """Run every mode at one small rate until it reaches the target."""
    return _run(setup, runner, dict.fromkeys(setup.modes, setup.same_lr), setup.same_s, to_target=True)


def own_rates(setup: Setup, runner: Runner, rates: dict[str, float]) -> Column:
    """Run every mode at its own rate for equal times."""
    return _run(setup, runner, rates, setup.tuned_s, to_target=False)


def equal_mass(own: Column, rates: dict[str, float]) -> dict[str, float]:
    """Return rates at which all modes have the step mass per second of lock step at its own rate."""
    mass = {mode: mean(outcomes, "mass_per_s") for mode, outcomes in own.items()}
    return {mode: _rounded(rates["BSP"] * mass["BSP"] / mass[mode]) for mode in rates}


def of_equal_mass(setup: Setup, runner: Runner, rates: dict[str, float]) -> Column:
    """Run every mode at its rate of equal step mass until it reaches the target."""
    return _run(setup, runner, rates, setup.simulated_s, to_target=True)


def _run(setup: Setup, runner: Runner, rates: dict[str, float], seconds: float, to_target: bool) -> Column:
    def trials(mode: str) -> Sequence[Trial]:
        return [Trial(mode, rates[mode], seed, seconds, to_target, setup.per_class, setup.kind) for seed in setup.seeds]

    runner.run([one for mode in rates for one in trials(mode)])
    return {mode: runner.run(trials(mode)) for mode in rates}


def _rounded(rate: float) -> float:
    """Keep two digits: a job that is run again after a stop has the same rate."""
    return float(f"{rate:.2g}")
