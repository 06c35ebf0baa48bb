"""The picture beside the report: one panel per row of the tables, one bar per contender.

The picture is drawn from the report's own tables (`figures`), so it can be drawn again without a measurement:
``python -m benchmarks --redraw``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Milliseconds per step, by row and contender.
Times = dict[str, dict[str, float]]

#: What each contender is called in the picture, by its name in the tables.
LABELS = {
    "arena": "arena, memory",
    "shm": "verbs, memory",
    "tcp-arena": "arena, TCP",
    "tcp": "verbs, TCP",
    "tcp-encrypted": "verbs, encrypted",
    "gloo": "Gloo",
    "mxnet": "MXNet, TCP",
    "paceline": "workers step",
    "paceline-server": "servers step",
    "ddp": "DDP",
    "alone": "alone",
}
PEERS = {"gloo", "mxnet", "ddp"}
#: Colour by kind; they differ in lightness too, so that the picture survives a black and white printer.
COLOURS = {"paceline": "#1b3f73", "peer": "#ee9a3a", "alone": "#dddddd"}
LEGEND = {"paceline": "paceline", "peer": "another library", "alone": "no exchange"}

_WIDTH_IN = 5.0
_BAR_IN = 0.23
_TITLE_IN = 0.27
_GAP_IN = 0.14
_HEAD_IN = 0.72
_LEFT, _RIGHT = 0.255, 0.985
#: The longest bar leaves this share of a panel's width to its label.
_ROOM_FOR_LABEL = 0.36


@dataclass(frozen=True)
class Bar:
    """One contender of a row."""

    name: str
    ms: float
    kind: str
    """A key of `COLOURS`."""
    ratio: float
    """Its time as a multiple of the first bar's."""

    @property
    def label(self) -> str:
        """What is written at the bar."""
        ratio = f"{self.ratio:.2f}" if self.ratio < 9.995 else f"{self.ratio:.0f}"
        return f"{_three_digits(self.ms)} ms, {ratio} ×"


@dataclass(frozen=True)
class Panel:
    """One row of a table; its first bar is ours and the measure of the others."""

    title: str
    bars: tuple[Bar, ...]


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def kind_of(name: str) -> str:
    return "peer" if name in PEERS else "alone" if name == "alone" else "paceline"


def panels(stores: Times, training: Times) -> list[Panel]:
    """Turn the report's figures into panels, in the order of the tables."""
    titled = [*stores.items(), *((f"training {title}", times) for title, times in training.items())]
    return [_panel(title, times) for title, times in titled]


def _panel(title: str, times: dict[str, float]) -> Panel:
    first = next(iter(times.values()))
    return Panel(title, tuple(Bar(LABELS[name], ms, kind_of(name), ms / first) for name, ms in times.items()))


def figures(report: str) -> tuple[Times, Times]:
    """Read the figures of the stores and of training back from the report's tables."""
    return _table(report, "ms per step"), _table(report, "training, ms per step")


def _table(report: str, corner: str) -> Times:
    lines = report.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {corner} |"))
    names = _cells(lines[start])[1:]
    found: Times = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        title, *cells = _cells(line)
        figures_of_row = zip(names, cells, strict=True)
        found[title] = {name: _number(cell) for name, cell in figures_of_row if name in LABELS and cell}
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(cell: str) -> float:
    match = re.match(r"[\d.]+", cell)
    assert match, f"{cell!r} begins with no number"
    return float(match[0])


def description(rows: Sequence[Panel]) -> str:
    """Return all that the picture says, as text."""
    return "\n".join(f"{row.title}: " + "; ".join(f"{bar.name} {bar.label}" for bar in row.bars) for row in rows)


def draw(rows: Sequence[Panel]) -> Figure:
    """Draw the panels below each other, narrow enough for a phone."""
    from matplotlib.figure import Figure

    heights = [len(panel.bars) * _BAR_IN for panel in rows]
    total = _HEAD_IN + sum(heights) + len(rows) * (_TITLE_IN + _GAP_IN)
    figure = Figure(figsize=(_WIDTH_IN, total))
    _head(figure, total)
    top = total - _HEAD_IN
    for panel, height in zip(rows, heights, strict=True):
        top -= _TITLE_IN
        axes = figure.add_axes((_LEFT, (top - height) / total, _RIGHT - _LEFT, height / total))
        _draw_panel(axes, panel)
        top -= height + _GAP_IN
    return figure


def _head(figure: Figure, total: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[kind], label=text) for kind, text in LEGEND.items()]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=10,
        columnspacing=1.2,
        handlelength=1.0,
        handleheight=1.0,
    )
    text = "Time per step, shorter is better. ×: as a multiple of the first bar."
    figure.text(0.02, 1 - 0.47 / total, text, fontsize=9.5, va="center", color="#333333")


def _draw_panel(axes: Axes, panel: Panel) -> None:
    slowest = max(bar.ms for bar in panel.bars)
    places = range(len(panel.bars))
    drawn = axes.barh(
        places, [bar.ms for bar in panel.bars], height=0.78, color=[COLOURS[bar.kind] for bar in panel.bars]
    )
    for text in axes.bar_label(drawn, [bar.label for bar in panel.bars], padding=4, fontsize=10):
        text.set_verticalalignment("center_baseline")
    axes.set_xlim(0, slowest / (1 - _ROOM_FOR_LABEL))
    axes.set_ylim(len(panel.bars) - 0.5, -0.5)
    axes.set_yticks(places, [bar.name for bar in panel.bars], fontsize=10)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("#888888")
    # The title begins at the left edge of the picture, above the names.
    axes.annotate(
        panel.title,
        xy=(0.02, 1),
        xycoords=("figure fraction", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=10.5,
        fontweight="bold",
        va="bottom",
    )
