"""A picture of simulated jobs: accuracy over time, and the staleness of updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.errors import MissingExtraError
from paceline.sim.job import Result


def draw(results: Mapping[str, Result], path: str | Path) -> None:
    """Write a picture; its format follows from the name (``.png``, ``.svg``, ``.pdf``).

    Args:
        results: results by name.
        path: path of the file.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: the format is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("pictures need matplotlib: pip install 'paceline[sim]'") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
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
    figure.savefig(path)
