"""What must hold, and the simulator beside the real jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from benchmarks.unequal import simulated
from benchmarks.unequal.columns import Column, Rates, Setup
from benchmarks.unequal.modes import CLASSES, MODES
from benchmarks.unequal.simulated import Service
from benchmarks.unequal.trial import TARGET, Outcome, Trial, mean, sooner

#: Part by which the simulator may be off.
CLOSE = 0.15
#: Accuracies at which curves are compared.
LEVELS = (0.70, 0.75, 0.80, 0.85, 0.90, TARGET)
#: Modes whose lead over lock step at one rate is predicted.
PREDICTED = ("GSP 1/Y", "GSP 1/Y +shares")


@dataclass(frozen=True)
class Check:
    """A figure and what it must be."""

    what: str
    figure: float
    wanted: str
    passed: bool

    @property
    def line(self) -> str:
        """The check as text."""
        return f"{'pass' if self.passed else 'FAIL'}  {self.what}: {self.figure:.3g} ({self.wanted})"


def predicted_ratio() -> float:
    """Return the step mass of groups with 1/Y over that of lock step: sum(r^2) / (sum(r) * slowest r)."""
    rates = [1 / seconds for seconds in CLASSES]
    return sum(rate**2 for rate in rates) / (sum(rates) * min(rates))


def checks(same: Column, own: Column, simulated_same: Column) -> list[Check]:
    """Return what must hold of the real jobs.

    Args:
        same: all modes at one rate.
        own: each mode at its own rate.
        simulated_same: at one rate in the simulator, the modes of :data:`PREDICTED` and lock step.
    """
    return [*_of_one_rate(same, simulated_same), *_of_speed(own), *_of_accuracy(own)]


def _of_one_rate(same: Column, simulated_same: Column) -> Iterator[Check]:
    for mode in PREDICTED:
        ratio = sooner(same[mode], same["BSP"])
        for by, predicted in (
            ("simulated", sooner(simulated_same[mode], simulated_same["BSP"])),
            ("by step mass", predicted_ratio()),
        ):
            wanted = f"within 10 % of {predicted:.2f}"
            yield Check(f"same rate, {mode} sooner than BSP, {by}", ratio, wanted, abs(ratio / predicted - 1) <= 0.1)


def _of_speed(own: Column) -> Iterator[Check]:
    rate = {mode: mean(outcomes, "batches_per_s") for mode, outcomes in own.items()}
    yield _at_least("batches/s, GSP 1/Y over BSP", rate["GSP 1/Y"] / rate["BSP"], 2.0)
    for mode in ("GSP 1/Y +shares", "GSP +shares"):
        yield _at_least(f"own rates, {mode} sooner than BSP", sooner(own[mode], own["BSP"]), 1.5)
        yield _at_least(f"own rates, {mode} sooner than SSP 3", sooner(own[mode], own["SSP 3"]), 1.4)
    yield _at_least("own rates, LB-BSP sooner than BSP", sooner(own["LB-BSP"], own["BSP"]), 1.7)


def _of_accuracy(own: Column) -> Iterator[Check]:
    final = {mode: 100 * mean(outcomes, "final") for mode, outcomes in own.items()}
    for mode in ("LB-BSP", "GSP 1/Y +shares", "GSP +shares"):
        yield _at_least(f"final accuracy, {mode} less BSP, points", final[mode] - final["BSP"], -0.5)


def _at_least(what: str, figure: float, least: float) -> Check:
    return Check(what, figure, f"at least {least:g}", figure >= least)


# ---- the simulator ---------------------------------------------------------------------------------------------------


def measured_service(own: Column) -> Service:
    """Return what exchanges took: with BSP a server sums twelve pushes per update, with ASP one."""
    each, together = (mean(own[mode], "server_ms") / 1e3 for mode in ("ASP", "BSP"))
    merge_s = min(together, each)
    exchange_s = mean(own["ASP"], "exchange_ms") / 1e3
    return Service(max(0.0, exchange_s - each) / 2, merge_s, each - merge_s)


@dataclass(frozen=True)
class Comparison:
    """A mode in the simulator over the same mode on real processes: ratios, 1 where they agree."""

    mode: str
    batches: float
    """Of batches per second."""
    curve: float
    """Of the times at which curves of accuracy reach the levels: each the median over seeds, their geometric mean."""
    target: float
    """Of the times to the target alone."""

    @property
    def passed(self) -> bool:
        """Whether throughput and curve are close."""
        return all(abs(one - 1) <= CLOSE for one in (self.batches, self.curve))

    @property
    def line(self) -> str:
        """The comparison as text."""
        word = "pass" if self.passed else "FAIL"
        return f"{word}  simulator over real, {self.mode}: batches/s {self.batches:.2f}, curve {self.curve:.2f}"


def simulated_same_rate(setup: Setup, service: Service) -> Column:
    """Return the jobs at one rate in the simulator, of the modes that are predicted and of lock step."""
    return {
        mode: [simulated.run(Trial(mode, setup.same_lr, seed, setup.same_s), service) for seed in setup.seeds]
        for mode in ("BSP", *PREDICTED)
    }


def simulated_column(setup: Setup, rates: dict[str, Rates], service: Service) -> Column:
    """Return the jobs at each mode's own rate in the simulator."""

    def outcome(mode: str, seed: int) -> Outcome:
        return simulated.run(Trial(mode, rates[mode].own, seed, setup.tuned_s, False, setup.per_class), service)

    return {mode: [outcome(mode, seed) for seed in setup.seeds] for mode in MODES}


def compared(real: Column, simulated: Column) -> list[Comparison]:
    """Return the simulator beside the real jobs, per mode."""
    return [_compare(mode, real[mode], simulated[mode]) for mode in real]


def _compare(mode: str, real: list[Outcome], simulated: list[Outcome]) -> Comparison:
    batches = mean(simulated, "batches_per_s") / mean(real, "batches_per_s")
    ratios = [sooner(real, simulated, level) for level in LEVELS]
    known = [one for one in ratios if 0 < one < math.inf]
    curve = math.exp(fmean(math.log(one) for one in known)) if known else math.nan
    return Comparison(mode, batches, curve, ratios[-1])
