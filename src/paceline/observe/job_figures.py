"""The figures of a job, of those that its workers report. Pure.

The figure of a step is the mean over the workers that reported it, weighted by samples. A step is complete

| when | because |
|---|---|
| all live workers have reported the figure for this step or a later one | none is missing |
| all workers that ever reported it have, and :data:`HOLD_S` have passed | the others do not report it |
| :data:`LATE_S` have passed | a worker takes longer: the others' figure counts |

Steps are complete in their order. A worker that reports a lower step than before has begun to count anew: such steps
follow the ones before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.wire import messages as m
from paceline.wire.limits import MAX_FIGURES

#: Seconds that a step waits for workers that have not reported the figure before, and for any worker.
HOLD_S, LATE_S = 2.0, 10.0

#: Incomplete steps of a figure; beyond that the first ones are complete.
MOST_OPEN = 256

#: Complete figures that are kept.
KEPT = 4096

#: How often a worker has begun to count steps anew, and a step.
_Position: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class JobFigure:
    """A figure of the job at one step."""

    name: str
    step: int
    value: float


@dataclass
class _Open:
    """The reports of one step."""

    since: float
    mean: float = 0.0
    weight: float = 0.0


@dataclass
class _Curve:
    """One figure."""

    last: dict[int, tuple[_Position, float]] = field(default_factory=dict)
    """Position and value that each worker has reported last."""
    open: dict[_Position, _Open] = field(default_factory=dict)
    done: _Position = (0, -1)
    value: tuple[int, float] | None = None
    """The last complete step, and its value."""

    def add(self, rank: int, step: int, value: float, samples: float, now: float) -> None:
        (lap, before), _ = self.last.get(rank, ((0, -1), 0.0))
        at = (lap + (step < before), step)
        self.last[rank] = at, value
        if at > self.done:  # else the step is complete without it
            one = self.open.setdefault(at, _Open(now))
            one.weight += samples
            share = samples / one.weight
            one.mean = (1 - share) * one.mean + share * value

    def complete(self, live: Collection[int], now: float) -> list[tuple[int, float]]:
        """Return the steps that have become complete, with their values."""
        known = min((at for rank, (at, _) in self.last.items() if rank in live), default=(math.inf, 0))
        every = known if all(rank in self.last for rank in live) else (0, -1)
        found = []
        for at in sorted(self.open):
            age = now - self.open[at].since
            is_complete = at <= every or (at <= known and age >= HOLD_S) or age >= LATE_S
            if not is_complete and len(self.open) <= MOST_OPEN:
                break
            one = self.open.pop(at)
            self.done, self.value = at, (at[1], one.mean)
            found.append(self.value)
        return found


class JobFigures:
    """Takes the reports of workers, and has the last figures of each and of the job.

    Attributes:
        history: complete figures of the job, the last ones.
        made: how many there have been.
    """

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}
        self._has_warned = False
        self.history: deque[JobFigure] = deque(maxlen=KEPT)
        self.made = 0

    def note(self, rank: int, reports: Iterable[m.ReportedFigures], now: float) -> str:
        """Take the reports of a heartbeat; returns a line for the log if there are too many figures."""
        refused = ""
        for one in reports:
            for name, value in one.figures.items():
                if name not in self._curves and len(self._curves) >= MAX_FIGURES:
                    refused = refused or name
                    continue
                self._curves.setdefault(name, _Curve()).add(rank, one.step, value, one.samples or 1.0, now)
        if not refused or self._has_warned:
            return ""
        self._has_warned = True
        return f"a job has at most {MAX_FIGURES} reported figures; {refused!r} of worker {rank} and others are left out"

    def settle(self, live: Collection[int], now: float) -> None:
        """Work out the figures of the steps that are complete.

        Args:
            live: ranks of the workers that have neither left nor died.
            now: seconds; infinite: all steps are complete.
        """
        for name, curve in self._curves.items():
            found = curve.complete(live, now)
            self.history.extend(JobFigure(name, step, value) for step, value in found)
            self.made += len(found)

    def since(self, number: int) -> list[JobFigure]:
        """Return the figures made since there were so many, as far as they are kept."""
        count = min(self.made - number, len(self.history))
        return list(self.history)[len(self.history) - count :]

    def of_worker(self, rank: int) -> dict[str, tuple[int, float]]:
        """Return the last figures of a worker, each with its step."""
        found = ((name, curve.last.get(rank)) for name, curve in self._curves.items())
        return {name: (last[0][1], last[1]) for name, last in found if last is not None}

    def of_job(self) -> dict[str, tuple[int, float]]:
        """Return the last figures of the job, each with its step."""
        return {name: curve.value for name, curve in self._curves.items() if curve.value is not None}
