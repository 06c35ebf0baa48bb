"""Cohorts, which workers they wait for, and how far the slowest of them is: kept, because every push asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.consistency.units import Units


@dataclass
class Cohort:
    """Pushes that wait until they are enough for one update."""

    number: int
    unit: int
    """The unit that fills it; -1 where any worker may."""
    phase: int
    """Phase of the unit's workers that fill it."""
    oldest: int
    """Oldest version that its contributors had read when they pushed."""
    workers: list[int] = field(default_factory=list)
    """Contributors, in the order of arrival."""
    samples: dict[int, float] = field(default_factory=dict)
    """Per contributor."""
    has_grace: bool = False
    """It has K pushes, and its time of grace has begun."""
    is_over: bool = False
    """That has ended."""

    def join(self, worker: int, samples: float, read: int) -> None:
        """Count a push."""
        self.workers.append(worker)
        self.samples[worker] = self.samples.get(worker, 0.0) + samples
        self.oldest = min(self.oldest, read)


class Activity:
    """The active workers of a slot, and the rounds that they have finished since the last barrier.

    It looks at the rule's own sets, which change only with :meth:`change`, and changes its rounds by :meth:`finish`.
    """

    def __init__(self, live: set[int], paused: set[int], away: set[int], units: Units, finished: list[int]) -> None:
        self._live, self._paused, self._away, self._units, self._finished = live, paused, away, units, finished
        self.level = [0] * len(finished)
        """Finished rounds from which the bound counts, per worker: at the last barrier, or :meth:`come_back`."""
        self.phase = [0] * len(finished)
        """Per worker, the phase that it has come back in last."""
        self.change()

    def change(self) -> None:
        """Note that workers have become active, or are no longer."""
        self.workers = self._live - self._paused - self._away
        """The workers that others wait for."""
        self._by_unit: dict[tuple[int, int], set[int]] = {}
        self._low = self._at_low = 0
        """Rounds of the slowest, and how many workers have no more; 0 or less: not known."""

    def open(self) -> None:
        """Note that a barrier has opened: a worker that pushed less before it need not catch up."""
        self.level = list(self._finished)
        self.change()

    def come_back(self, worker: int, phase: int) -> None:
        """Note that others wait for a worker again: in that phase, and as far ahead as the workers of its unit.

        Those may have finished rounds without it. If it were behind them, they would wait for it by the bound, and it
        for them by the cohort, for ever.
        """
        others = self.of_unit(self._units.of[worker], self.phase[worker]) & self.workers
        if others and worker not in self.workers:
            self.level[worker] = self._finished[worker] - min(map(self.ahead, others))
        self._paused.discard(worker)
        self._away.discard(worker)
        self.phase[worker] = phase
        self.change()

    def finish(self, worker: int, round: int) -> None:
        """Note that a worker has finished a round."""
        if self._at_low and worker in self.workers and self.ahead(worker) == self._low:
            self._at_low -= 1
        self._finished[worker] = round

    def of_unit(self, unit: int, phase: int) -> set[int]:
        """Return the workers whose pushes a cohort needs: those in its phase, and those that are still to come there.

        Args:
            unit: the cohort's unit, with the workers that are to move there; -1: all.
            phase: the cohort's phase; workers that are away in an earlier one are to come.
        """
        found = self._by_unit.get((unit, phase))
        if found is None:
            here = {worker for worker in self._live - self._paused if self.phase[worker] <= phase}
            here -= {worker for worker in self._away if self.phase[worker] == phase}
            found = {worker for worker in here if unit == -1 or self._units.has(unit, worker)}
            self._by_unit[unit, phase] = found
        return found

    def ahead(self, worker: int) -> int:
        """Return the rounds that a worker has finished since the last barrier."""
        return self._finished[worker] - self.level[worker]

    def slowest(self, worker: int) -> int:
        """Return the rounds that the slowest active worker has finished since the last barrier, this one included."""
        return min(self.lowest(), self.ahead(worker)) if self.workers else self.ahead(worker)

    def lowest(self) -> int:
        """Return the rounds of the slowest active worker; 0 if none is active."""
        if self._at_low <= 0:
            rounds = [self.ahead(worker) for worker in self.workers] or [0]
            self._low = min(rounds)
            self._at_low = rounds.count(self._low)
        return self._low
