"""Pictures of simulated jobs: accuracy over time and staleness of updates; throughput and efficiency by workers."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, MissingExtraError
from paceline.sim.scaling import LAYOUTS, Estimate
from paceline.sim.simulation import Result


def check_path(path: str | Path) -> None:
    """Check that a picture can be written, before the work that it shows.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    file = Path(path)
    with _errors(path):
        if not file.suffix:  # matplotlib would write to another name
            raise ValueError("its format follows from its name, as in picture.png")
        new_figure(1, 1).savefig(io.BytesIO(), format=file.suffix[1:])
        if not file.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file.parent))
        if file.exists() and not file.is_file():
            raise ValueError("it is no regular file")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


def save(figure: Any, path: str | Path) -> None:
    """Write a picture; its format follows from the name (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ConfigError: it cannot be written; the message says why.
    """
    with _errors(path):
        figure.savefig(path)


@contextlib.contextmanager
def _errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def draw(results: Mapping[str, Result], path: str | Path) -> None:
    """Write a picture of simulated jobs.

    Raises:
        ConfigError: it cannot be written.
    """
    figure = new_figure(10, 4)
    curves, ages = figure.subplots(1, 2)
    for name, result in results.items():
        if result.curve:
            curves.plot(*zip(*result.curve, strict=True), label=name)
        total = max(1, result.stats.updates)
        histogram = sorted(result.staleness.items())
        ages.plot([age for age, _ in histogram], [count / total for _, count in histogram], marker="o", label=name)
    curves.set(xlabel="simulated seconds", ylabel="test accuracy")
    ages.set(xlabel="staleness of an update", ylabel="part of all updates", xscale="log")
    ages.legend()
    save(figure, path)


def draw_scaling(estimates: Sequence[Estimate], path: str | Path) -> None:
    """Write a picture of each layout by workers: efficiency (lines) and throughput (columns), without and with overlap.
    There are estimates of all layouts for some numbers of workers, with and without overlap.

    Raises:
        ConfigError: it cannot be written.
    """
    figure = new_figure(12, 4.5)
    counts = sorted({one.workers for one in estimates})
    for axes, overlap in zip(figure.subplots(1, 2), (False, True), strict=True):
        lines = axes.twinx()
        for number, layout in enumerate(LAYOUTS):
            some = [one for one in estimates if (one.way.layout, one.way.overlap) == (layout, overlap)]
            some.sort(key=lambda one: one.workers)
            left = [counts.index(one.workers) + (number - 2) / 6 for one in some]
            axes.bar(left, [one.samples_per_s for one in some], 1 / 6, color=f"C{number}", alpha=0.4)
            lines.plot(range(len(some)), [one.efficiency for one in some], f"C{number}o-", label=layout)
        axes.set(xlabel="workers", ylabel="samples/s (columns)", yscale="log")
        axes.set_title("push and pull during backward" if overlap else "push, then pull")
        axes.set_xticks(range(len(counts)), [f"{count}" for count in counts], rotation=45)
        lines.set(ylabel="efficiency (lines)", ylim=(0, 1.05))
        lines.yaxis.set_major_formatter("{x:.0%}")
    figure.legend(*lines.get_legend_handles_labels(), loc="outside lower center", ncols=len(LAYOUTS))
    save(figure, path)


def new_figure(width: float, height: float) -> Any:
    """Return an empty picture of a size in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("pictures need matplotlib: pip install 'paceline[sim]'") from None
    return Figure(figsize=(width, height), layout="constrained")
