"""Events that a rule takes, and actions that it tells a store to carry out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Pushed:
    """One worker's part in a sum that arrives as one push."""

    worker: int
    round: int
    samples: float = 1.0


@dataclass(frozen=True)
class Merge:
    """Add the pushed values to a cohort."""

    cohort: int
    worker: int
    """The worker that pushed; for a sum, the first of its workers."""


@dataclass(frozen=True)
class Drop:
    """Ignore the pushed values: the push has missed more updates than the age limit allows."""

    worker: int
    version: int
    """Version that it was too old for."""


@dataclass(frozen=True)
class Apply:
    """A cohort is complete: run the optimizer once on its merged values, scaled by ``weight``."""

    cohort: int
    workers: tuple[int, ...]
    """Contributors, in the order in which their values are summed; with an age limit one may contribute twice."""
    samples: float
    staleness: int
    weight: float
    version: int
    """Version after the update."""


@dataclass(frozen=True)
class Grace:
    """A cohort has K pushes, and others may still come: end its time of grace later (:meth:`Rule.end_grace`)."""

    cohort: int


@dataclass(frozen=True)
class Release:
    """Answer these workers' pushes; all of them get the values of the same version."""

    workers: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class Repeat:
    """Answer again and change nothing: the push was seen and answered before."""

    worker: int
    version: int


@dataclass(frozen=True)
class Refuse:
    """The push is invalid, and has changed no state."""

    worker: int
    reason: str


Action: TypeAlias = Merge | Drop | Apply | Grace | Release | Repeat | Refuse
