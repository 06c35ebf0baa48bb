"""Which workers step together, and how they move to other groups while they train.

Groups have *generations*: the groups of a job's start are generation 0. Each worker moves to a newer generation by
itself, between two of its rounds, the same two at every slot. For the cohorts of a unit this means::

    a worker       of the unit's generation     is waited for by the unit
    has not moved  older: it is to come         yes, if the groups of that generation name it
    has moved in   the same                     yes
    has moved on   newer                        no: it pushes there no more

So a new group makes its first update when all its workers have moved, an old one goes on with those that have not, and
each cohort is made of the same rounds of the same workers at all slots, in whatever order messages arrive. There is no
circle of waits: a worker waits only for workers of its own generation or an older one, and the oldest only for its own.
"""

from __future__ import annotations

from collections.abc import Sequence

Groups = Sequence[Sequence[int]]


class Units:
    """The unit of each worker.

    Args:
        unit: unit of each worker in generation 0; numbers below the number of workers.

    Attributes:
        of: unit of each worker now.
        generation: generation of each worker's unit.
    """

    def __init__(self, unit: list[int]) -> None:
        self.of = unit
        self._alone = frozenset(one for one in unit if unit.count(one) == 1)
        """Units of generation 0 with one worker."""
        self.generation = [0] * len(unit)
        self._named: dict[int, frozenset[int]] = {}
        """By unit, the workers that groups of later generations name."""

    def move(self, worker: int, generation: int, groups: Groups) -> None:
        """Move a worker to its group of a newer generation."""
        first = generation * len(self.of)
        for index, group in enumerate(groups):
            self._named[first + index] = frozenset(group)
            if worker in group:
                self.of[worker] = first + index
        self.generation[worker] = generation
        newest = max(self.generation)
        used = set(self.of)
        self._named = {
            unit: group for unit, group in self._named.items() if unit in used or self._generation_of(unit) == newest
        }

    def has(self, unit: int, worker: int) -> bool:
        """Return whether a unit's cohorts need pushes of a worker."""
        if self.of[worker] == unit:
            return True
        return worker in self._named.get(unit, ()) and self.generation[worker] < self._generation_of(unit)

    def is_alone(self, unit: int) -> bool:
        """Return whether a unit was formed of one worker, so that no others must read the versions that it reads."""
        return len(self._named[unit]) == 1 if unit in self._named else unit in self._alone

    @property
    def has_changed(self) -> bool:
        """Whether a worker has moved since the start."""
        return any(self.generation)

    def _generation_of(self, unit: int) -> int:
        return unit // len(self.of)
