"""Weights of stale updates: functions of the staleness."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from paceline import extensions
from paceline.extensions import register

#: ``weight(staleness, history)``: staleness is 1 for a fresh update; history is (updates, sum of 1/staleness) so far,
#: this update included.
Weighting: TypeAlias = Callable[[int, tuple[int, float]], float]


@register("weighting", "none")
def _none(staleness: int, history: tuple[int, float]) -> float:
    return 1.0


@register("weighting", "inverse")
def _inverse(staleness: int, history: tuple[int, float]) -> float:
    """1/Y: MXNet-G, and the staleness-aware rate of Zhang et al. (IJCAI 2016)."""
    return 1.0 / staleness


@register("weighting", "normalised")
def _normalised(staleness: int, history: tuple[int, float]) -> float:
    """1/Y with mean 1, so that the step per update stays as in synchronous SGD."""
    updates, inverse_sum = history
    return updates / (staleness * inverse_sum)


def weighting_names(packages: bool = True) -> list[str]:
    """Return all known names, with the names of installed ``packages``, sorted."""
    return extensions.names("weighting") if packages else sorted(extensions.registered("weighting"))


def find_weighting(name: str) -> Weighting:
    """Return the weighting behind a name.

    Raises:
        ValueError: unknown name.
    """
    return cast(Weighting, extensions.find("weighting", name))
