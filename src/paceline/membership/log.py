"""The log of a job's membership: who counts from when on, and who was dealt which samples. Pure.

Each change is a *generation*, numbered from 0, the start of the job:

| kind         | from the next round on                                          | its number is also                |
|--------------|-----------------------------------------------------------------|-----------------------------------|
| ``starts``   | all workers count                                               |                                   |
| ``left``     | a worker counts no more; ``round`` was its last one             |                                   |
| ``died``     | the same; its last round is the highest that a server has       |                                   |
| ``joins``    | a worker counts again, with its rank, as another process        | that of the phase in which it is  |
| ``regroups`` | the workers step in other groups, each from its next round on   | the generation of ``Regroup``     |
| ``walks``    | the next epoch of a pool begins: workers that waited are back   | the phase of ``Back``             |

So one sequence of numbers orders the changes of all kinds, and whoever has reached one has reached those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import msgspec

from paceline.wire import messages as m

#: Changes that a status shows, and words on samples that are known: the same word comes from each worker.
_SHOWN, _KNOWN = 8, 4096


class MembershipLog:
    """The changes of one job so far.

    Attributes:
        generation: number of the last change.
        groups: the generation in which the groups have changed last, and these; 0: they have not.
    """

    def __init__(self) -> None:
        self.generation = -1
        self.groups: tuple[int, list[list[int]]] = (0, [])
        self._now = 0.0
        self._shown: deque[tuple[float, m.Change]] = deque(maxlen=_SHOWN)
        self._new: list[m.Change | m.Dealt] = []
        self._known: dict[tuple[str, int, int], None] = {}

    def turn(self, now: float) -> None:
        """Note the time, in seconds on the machine's clock."""
        self._now = now

    # ---- changes ---------------------------------------------------------------------------------------------------

    def add(self, kind: str, workers: Collection[int], round: int = 0, why: str = "") -> int:
        """Note a change; returns its number."""
        return self._add(m.Change(self.generation + 1, kind, sorted(workers), round, why))

    def regroup(self, groups: Sequence[Sequence[int]], round: int) -> None:
        """Note that workers step in other groups from now on."""
        members = sorted(rank for group in groups for rank in group)
        made = m.Change(self.generation + 1, "regroups", members, round, "", [list(group) for group in groups])
        self.groups = self._add(made), made.groups

    def _add(self, change: m.Change) -> int:
        self.generation = change.generation
        self._shown.append((self._now, change))
        self._new.append(change)
        return self.generation

    # ---- samples ---------------------------------------------------------------------------------------------------

    def note_dealt(self, dealt: Sequence[m.Dealt]) -> None:
        """Take a worker's words on what was dealt; all workers say the same, and it counts once."""
        for one in dealt:
            key = one.sampler, one.epoch, one.round
            if key not in self._known:
                self._known[key] = None
                self._new.append(one)
        for key in list(self._known)[:-_KNOWN]:
            del self._known[key]

    # ---- for others ------------------------------------------------------------------------------------------------

    def take(self) -> list[m.Change | m.Dealt]:
        """Return what is new since the last call."""
        new, self._new = self._new, []
        return new

    def shown(self, now: float) -> list[m.Change]:
        """Return the last changes, the oldest first, for a status."""
        return [msgspec.structs.replace(one, ago_s=max(0.0, now - when)) for when, one in self._shown]
