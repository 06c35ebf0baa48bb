"""The benchmark's table, checks and further lines, as Markdown and as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.unequal.accept import Check, Comparison
from benchmarks.unequal.columns import Column, Rates
from benchmarks.unequal.losing import Regimes
from benchmarks.unequal.simulated import Service
from benchmarks.unequal.trial import TARGET, mean, middle_s, sooner


@dataclass(frozen=True)
class Findings:
    """All that was found."""

    same_lr: float
    rates: Mapping[str, Rates]
    same: Column
    own: Column
    equal: Column
    simulated: Column
    """At each mode's own rate."""
    service: Service
    checks: Sequence[Check]
    compared: Sequence[Comparison]
    losing: Regimes
    rejected: Sequence[str]
    """Jobs whose deadlines were overrun, and which do not count."""


HEAD = (
    "mode", "same rate, s", "own rate, s", "equal step mass, s", "rates", "batches/s", "staleness", "step mass/s",
    "accuracy",
)  # fmt: skip

_MEANS = ("batches_per_s", "staleness", "mass_per_s")


def table(found: Findings) -> list[str]:
    """Return the table: medians of times to the target over seeds, means of the rest at each mode's own rate."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    return [*lines, *(f"| {' | '.join(_row(found, mode))} |" for mode in found.own)]


def _row(found: Findings, mode: str) -> list[str]:
    own, rates = found.own[mode], found.rates[mode]
    used = f"{found.same_lr:g}, {rates.own:g}, {rates.equal_mass:g}"
    times = [_time(column, mode) for column in (found.same, found.own, found.equal)]
    batches, staleness, mass = (mean(own, name) for name in _MEANS)
    return [mode, *times, used, f"{batches:.1f}", f"{staleness:.2f}", f"{mass:.1f}", f"{mean(own, 'final'):.2%}"]


def _time(column: Column, mode: str) -> str:
    seconds, ratio = middle_s(column[mode]), sooner(column[mode], column["BSP"])
    if math.isinf(seconds):
        return "-"
    return f"{seconds:.1f} ({ratio:.1f} x)" if math.isfinite(ratio) else f"{seconds:.1f}"


def losing_table(regimes: Regimes) -> list[str]:
    """Return how many times as soon as lock step each mode is, by regime."""
    modes = list(next(iter(regimes.values())))
    lines = [f"| simulated machines | {' | '.join(modes)} |", "|---" * (len(modes) + 1) + "|"]
    cells = {name: " | ".join(f"{row[mode]:.1f}" for mode in modes) for name, row in regimes.items()}
    return [*lines, *(f"| {name} | {row} |" for name, row in cells.items())]


def markdown(found: Findings, what: str, picture: str) -> str:
    """Return the whole report.

    Args:
        found: what was found.
        what: the machine and the date.
        picture: name of the picture beside the report.
    """
    columns = (found.same, found.own, found.equal)
    every = [one for column in columns for outcomes in column.values() for one in outcomes if one.counts]
    unconfirmed = [mode for mode, rates in found.rates.items() if rates.own != rates.simulated]
    lines = [
        "# Twelve workers of three speeds",
        "",
        f"`nox -s bench-unequal`, {what}.",
        "",
        f"Seconds until {TARGET:.0%} of the test samples are right, and how many times as soon as BSP with the same",
        "seed: medians over seeds. Then each mode's three rates, and means at its own rate. Batches take 150, 300 or",
        "600 ms by deadline.",
        "",
        *table(found),
        "",
        f"![Accuracy over time, and times to the target]({picture})",
        "",
        f"At most, of any job: {max(one.overruns for one in every):.1%} of batches late, "
        f"{max(one.gradient_ms for one in every):.1f} ms for a gradient, "
        f"{max(one.busy_cores for one in every):.1f} processors busy.",
        f"Rejected jobs: {len(found.rejected)}. Rates that real processes moved: {', '.join(unconfirmed) or 'none'}.",
        "",
        "```",
        *(one.line for one in found.checks),
        *(one.line for one in found.compared),
        "```",
        "",
        "Simulated, each mode at its own rate: how many times as soon as BSP it reaches the target.",
        "",
        *losing_table(found.losing),
    ]
    return "\n".join(lines) + "\n"


def as_json(found: Findings) -> dict[str, Any]:
    """Return the figures without curves."""
    columns = {"same": found.same, "own": found.own, "equal": found.equal, "simulated": found.simulated}
    times = {name: {mode: _plain(middle_s(one)) for mode, one in column.items()} for name, column in columns.items()}
    return {
        "seconds": times,
        "rates": {mode: asdict(one) for mode, one in found.rates.items()},
        "batches_per_s": {mode: _plain(mean(own, "batches_per_s")) for mode, own in found.own.items()},
        "accuracy": {mode: _plain(mean(own, "final")) for mode, own in found.own.items()},
        "service": asdict(found.service),
        "checks": {one.what: one.passed for one in found.checks},
        "simulator": {one.mode: {"batches": _plain(one.batches), "curve": _plain(one.curve)} for one in found.compared},
        "losing": {name: {mode: _plain(one) for mode, one in row.items()} for name, row in found.losing.items()},
        "rejected": list(found.rejected),
    }


def _plain(number: float) -> float | None:
    return round(number, 4) if math.isfinite(number) else None
