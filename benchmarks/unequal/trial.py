"""One job to run, and what it gave; both as JSON, so that jobs that were run count when the benchmark goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.unequal.modes import Kind, Machines

#: Accuracy that ends a job, as the mean of three evaluations.
TARGET = 0.92
#: Of lock step, a round: so curves of all modes have points at like distances.
EVALUATE_S = 0.6


@dataclass(frozen=True)
class Trial:
    """A mode at a learning rate; equal seeds have equal first weights, test samples and parts of the data."""

    mode: str
    lr: float
    seed: int
    seconds: float
    """End of the job, if it does not end at the target."""
    to_target: bool = True
    """Whether the job ends at the target."""
    per_class: int = 4
    kind: Kind = "classes"

    @property
    def machines(self) -> Machines:
        """The machines that it runs on."""
        return Machines(self.per_class, self.kind)


@dataclass(frozen=True)
class Outcome:
    """What a job gave."""

    seconds: float
    batches_per_s: float
    samples_per_s: float
    staleness: float
    """Mean over updates."""
    mass_per_s: float
    """Sum of weights of updates per second: step mass over learning rate."""
    curve: tuple[tuple[float, float], ...]
    """(seconds, accuracy)."""
    overruns: float = 0.0
    """Part of batches that overran their deadline."""
    gradient_ms: float = 0.0
    exchange_ms: float = 0.0
    """Median of a fast worker from push to answer."""
    fetch_ms: float = 0.0
    """Mean time until a worker has its next samples: of a pool or of measured shares, an exchange too."""
    server_ms: float = 0.0
    """The server's processor time per push."""
    busy_cores: float = 0.0

    def reached_s(self, level: float) -> float:
        """Return when the mean of three evaluations reached an accuracy, between two of them; infinite: never."""
        before = (0.0, 0.0)
        for seconds, mean in smoothed(self.curve):
            if mean >= level:
                return before[0] + (seconds - before[0]) * (level - before[1]) / (mean - before[1])
            before = (seconds, mean)
        return math.inf

    @property
    def counts(self) -> bool:
        """Whether the job ran and was not rejected."""
        return self.seconds > 0

    @property
    def final(self) -> float:
        """Mean accuracy of the last fifth of the time."""
        last = [accuracy for seconds, accuracy in self.curve if seconds >= 0.8 * self.curve[-1][0]]
        return sum(last) / len(last)


def smoothed(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a curve whose accuracies are means of three evaluations in a row."""
    return [(curve[i][0], sum(one for _, one in curve[i - 2 : i + 1]) / 3) for i in range(2, len(curve))]


def middle_s(outcomes: Iterable[Outcome], level: float = TARGET) -> float:
    """Return the median time to an accuracy."""
    return median(one.reached_s(level) for one in outcomes)


def sooner(outcomes: Sequence[Outcome], than: Sequence[Outcome], level: float = TARGET) -> float:
    """Return how many times as soon jobs reach an accuracy as others of the same seeds: the median over seeds.

    Test samples are the seed's, and some are harder, so only jobs of one seed are compared. Infinite: never the others;
    0: never these; NaN: neither.
    """
    times = [(one.reached_s(level), other.reached_s(level)) for one, other in zip(outcomes, than, strict=True)]
    ratios = [other / one if other < math.inf else math.inf for one, other in times if min(one, other) < math.inf]
    return median(ratios) if ratios else math.nan


def mean(outcomes: Iterable[Outcome], name: str) -> float:
    """Return the mean of a figure over the jobs that count."""
    return fmean([getattr(one, name) for one in outcomes if one.counts] or [math.nan])


class Ledger:
    """Jobs that were run, one JSON line for each; a line that was cut off by a kill is ignored.

    Args:
        path: the file; what is in it counts as run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[Trial, Outcome] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                self._note(json.loads(line))
            except (ValueError, TypeError, KeyError):
                continue

    def get(self, trial: Trial) -> Outcome | None:
        """Return what a job gave, None if it was not run."""
        return self._known.get(trial)

    def add(self, trial: Trial, outcome: Outcome) -> None:
        """Note a job."""
        self._known[trial] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps({"trial": asdict(trial), "outcome": asdict(outcome)}) + "\n")

    def _note(self, line: dict[str, Any]) -> None:
        outcome = line["outcome"] | {"curve": tuple((seconds, one) for seconds, one in line["outcome"]["curve"])}
        self._known[Trial(**line["trial"])] = Outcome(**outcome)
