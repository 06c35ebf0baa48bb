"""Draws the memory of every process over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.soak.job import Outcome
from tests.soak.samples import MIB

_PANEL_IN, _WIDTH_IN = 2.2, 7.0


def draw(outcomes: Mapping[str, Mapping[str, Outcome]], path: Path) -> None:
    """Write a picture: a panel per mode, a line per process; each begins at 0.

    Args:
        outcomes: by mode, then by process.
        path: of the picture; its ending says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _PANEL_IN * len(outcomes)), layout="constrained")
    panels = figure.subplots(len(outcomes), 1, squeeze=False)[:, 0]
    for axes, (mode, processes) in zip(panels, outcomes.items(), strict=True):
        for name, one in processes.items():
            first = one.samples[0]
            minutes = [(sample.at_s - first.at_s) / 60 for sample in one.samples]
            more = [(sample.memory_bytes - first.memory_bytes) / MIB for sample in one.samples]
            axes.plot(minutes, more, label=name, linewidth=1.2)
        axes.set_title(mode, loc="left", fontsize=10, fontweight="bold")
        axes.set_ylabel("MiB more", fontsize=9)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("minutes after the first", fontsize=9)
    panels[0].legend(fontsize=7, ncols=3)
    figure.savefig(path)


def listed(outcomes: Mapping[str, Mapping[str, Outcome]]) -> Sequence[tuple[str, str, Outcome]]:
    """Return (mode, process, outcome) of all processes."""
    return [(mode, name, one) for mode, processes in outcomes.items() for name, one in processes.items()]
