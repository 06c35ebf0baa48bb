"""Which workers that have died are started again, and when. Pure.

| a process of a worker | then |
|---|---|
| dies, the others go on, and fewer than ``most`` were started again | another one is started, after a pause |
| dies, and ``most`` were started again | the worker is done with |
| has joined (the scheduler says so) | its exit code counts as any other's |
| has not joined, and the job ends | it is ended, and its exit code does not count |

Pauses: none before the first, then 1 s, 2 s, 4 s and so on, at most ``LONGEST_PAUSE_S``.
"""

from __future__ import annotations

from collections import Counter

from paceline.launch.plan import ProcessName

LONGEST_PAUSE_S = 60.0


class Replacing:
    """The workers of one job that are started again, each up to ``most`` times; times are seconds on one clock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._starts: Counter[ProcessName] = Counter()
        self._due: dict[ProcessName, float] = {}
        self.outside: set[ProcessName] = set()
        """Workers whose last process has not joined."""

    def may_start(self, member: ProcessName) -> bool:
        """Tell whether a worker that dies is started again."""
        return self._starts[member] < self._most

    def note_death(self, member: ProcessName, now: float) -> bool:
        """Note that a worker's process has died and ended; returns whether another one will be started."""
        if not self.may_start(member):
            return False
        before = self._starts[member]
        self._starts[member] += 1
        self._due[member] = now + (min(2.0 ** (before - 1), LONGEST_PAUSE_S) if before else 0.0)
        self.outside.add(member)
        return True

    def joined(self, member: ProcessName) -> None:
        """Note that a process counts."""
        self.outside.discard(member)

    def number(self, member: ProcessName) -> int:
        """Return how many processes of this worker were started before the last one."""
        return self._starts[member]

    @property
    def deadline(self) -> float | None:
        """When the next one is started."""
        return min(self._due.values(), default=None)

    def take_due(self, now: float) -> tuple[ProcessName, ...]:
        """Return those that are to be started now."""
        due = tuple(member for member, at in self._due.items() if at <= now)
        for member in due:
            del self._due[member]
        return due

    def stop(self) -> list[ProcessName]:
        """Start none any more; returns the workers that none has been started for."""
        waiting = list(self._due)
        self._due.clear()
        return waiting
