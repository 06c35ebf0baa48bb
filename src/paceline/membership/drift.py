"""Groups of a running job that follow the workers' speeds. Pure.

===========================================================  =====================================
event                                                        effect
===========================================================  =====================================
every live worker has made ``regroup_rounds`` more rounds    :class:`~paceline.hetero.Regrouping`
                                                             compares their speeds with the groups
it finds other groups                                        a new generation, which all workers
                                                             learn with their next news
a worker leaves or dies                                      its group shrinks
===========================================================  =====================================

Each worker moves to the groups of the newest generation that it knows, between two of its rounds, and says so to the
servers (:mod:`paceline.consistency.units`).
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.config import Settings
from paceline.consistency import parse_groups
from paceline.hetero import Regrouping, group_by_speed
from paceline.membership.checks import Checks
from paceline.membership.roster import MemberRecord


class Drift:
    """The groups that fit the measured speeds.

    Args:
        settings: settings with the groups of the start, by rank, and the interval of checks.

    Attributes:
        generation: number of the groups; 0: those of the start.
    """

    def __init__(self, settings: Settings) -> None:
        self._checks = Checks(settings.regroup_rounds)
        self.generation = 0
        groups = parse_groups(settings.groups.replace(";", "\n")) if settings.regroup_rounds and settings.groups else []
        by_rank = groups and all(member.isdecimal() for group in groups for member in group)
        self._groups: Regrouping | None = None
        self._problem = ""
        if by_rank and settings.staleness is None:
            try:
                group_by_speed([1.0, 2.0])  # loads scikit-learn, which takes seconds, before the job begins
                self._groups = Regrouping(tuple(tuple(map(int, group)) for group in groups))
            except ImportError as error:
                self._problem = f"the groups stay as they are: {error}"

    @property
    def groups(self) -> list[list[int]]:
        """The groups from generation 1 on."""
        return [list(group) for group in self._groups.groups] if self._groups is not None and self.generation else []

    def check(self, workers: Iterable[MemberRecord]) -> str:
        """Compare speeds and groups, if it is time to; returns a sentence if the groups have changed or cannot."""
        if self._problem:
            problem, self._problem = self._problem, ""
            return problem
        live = [one for one in workers if one.live]
        if self._groups is None or not self._checks.is_due(live):
            return ""
        known = {rank for group in self._groups.groups for rank in group}
        for rank in known - {one.member.rank for one in live}:
            self._groups.leave(rank)
        changed = self._groups.check_speeds({one.member.rank: one.usual_s for one in live})
        self.generation += changed
        texts = [" ".join(map(str, group)) for group in self.groups]
        return f"the workers' speeds have changed; groups from now on: {', '.join(texts)}" if changed else ""
