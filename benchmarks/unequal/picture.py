"""The benchmark's picture: accuracy over time, real and simulated, and times to the target in three columns."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.unequal.columns import Column
from benchmarks.unequal.report import Findings
from benchmarks.unequal.trial import TARGET, smoothed, sooner

_DPI = 160
_COLUMNS = {"same": "same rate", "own": "own rate", "equal": "equal step mass"}


def write(found: Findings, path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    curves, bars = figure.subplots(2, 1)
    _draw_curves(curves, found)
    _draw_bars(bars, {label: getattr(found, name) for name, label in _COLUMNS.items()})
    figure.savefig(path, dpi=_DPI)


def _draw_curves(axes: Axes, found: Findings) -> None:
    """Draw the first seed's curves; dotted: the simulator's."""
    for mode, outcomes in found.own.items():
        if not outcomes[0].counts:
            continue
        (line,) = axes.plot(*zip(*smoothed(outcomes[0].curve), strict=True), label=mode, linewidth=1.2)
        simulated = smoothed(found.simulated[mode][0].curve)
        axes.plot(*zip(*simulated, strict=True), color=line.get_color(), linestyle=":", linewidth=1.0)
    axes.axhline(TARGET, color="#888888", linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="test accuracy (dotted: simulated)", ylim=(0.5, 1.0))
    axes.set_title("Each mode at its own rate", fontsize=10)
    axes.legend(fontsize=8, ncols=2)


def _draw_bars(axes: Axes, columns: dict[str, Column]) -> None:
    modes = list(next(iter(columns.values())))
    width = 0.8 / len(columns)
    for number, (label, column) in enumerate(columns.items()):
        found = [sooner(column[mode], column["BSP"]) for mode in modes]
        places = [index + (number - 1) * width for index in range(len(modes))]
        drawn = axes.bar(places, [one if math.isfinite(one) else 0.0 for one in found], width, label=label)
        axes.bar_label(drawn, [f"{one:.1f}" if math.isfinite(one) and one else "-" for one in found], fontsize=7)
    axes.set_xticks(range(len(modes)), modes, fontsize=8)
    axes.set_yscale("log")
    axes.set_title("Times as soon as BSP at the target", fontsize=10)
    axes.legend(fontsize=8)
