"""What a stale update counts: functions of its staleness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from paceline.naming import suggestion

#: ``weight(staleness, history)``: staleness is 1 for a fresh update; history is (updates, sum of 1/staleness) so far,
#: this update included.
Weighting: TypeAlias = Callable[[int, tuple[int, float]], float]


def _none(staleness: int, history: tuple[int, float]) -> float:
    return 1.0


def _inverse(staleness: int, history: tuple[int, float]) -> float:
    """1/Y: MXNet-G, and the staleness-aware rate of Zhang et al. (IJCAI 2016)."""
    return 1.0 / staleness


def _normalised(staleness: int, history: tuple[int, float]) -> float:
    """1/Y with mean 1, so that the step per update stays that of synchronous SGD."""
    updates, inverse_sum = history
    return updates / (staleness * inverse_sum)


_REGISTRY: dict[str, Weighting] = {"none": _none, "inverse": _inverse, "normalised": _normalised}


def register_weighting(name: str, function: Weighting) -> None:
    """Make a weighting available by name in this process.

    Raises:
        ValueError: the name is taken.
    """
    if name in weighting_names():
        raise ValueError(f"a weighting named {name!r} is registered already")
    _REGISTRY[name] = function


def weighting_names() -> list[str]:
    """Return all known names."""
    return sorted(_REGISTRY)


def find_weighting(name: str, registry: Mapping[str, Weighting] = _REGISTRY) -> Weighting:
    """Return the weighting behind a name.

    Raises:
        ValueError: unknown name.
    """
    if name not in registry:
        raise ValueError(f"unknown weighting {name!r}{suggestion(name, weighting_names())}")
    return registry[name]
