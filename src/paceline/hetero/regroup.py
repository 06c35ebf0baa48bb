"""Forms groups anew when speeds drift, and only then.

========  ==============================================  ============================================
state     event                                           becomes
========  ==============================================  ============================================
steady    a check finds the groups in order               steady
steady    a check finds them out of order                 doubtful, with the groups that would be right
doubtful  a check finds the same right groups again       doubtful; after ``patience`` of them steady, with new groups
doubtful  a check finds other right groups                doubtful, counting from one
doubtful  a check finds the groups in order               steady
any       ``leave(worker)``                               steady; the worker's group shrinks
========  ==============================================  ============================================

*Out of order*: the slowest member of a group takes longer than the fastest by more than :data:`SPREAD`, or two groups
are so close that one would be enough (:data:`CLOSE`). Between these limits and
:data:`~paceline.hetero.groups.ALIKE`, by which groups are formed, lies the effect of noise. Noise that passes even
these limits must also lead to other groups, the same ones in ``patience`` checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from paceline.hetero.groups import ALIKE, Groups, group_by_speed

#: Ratio of the slowest to the fastest member of a group beyond which it is cut, if the clusters say so.
SPREAD = 1.1 * ALIKE

#: Ratio of the typical times of two groups below which they are joined, if the clusters say so.
CLOSE = ALIKE**0.5


class Regrouping:
    """The groups of a job, and when to change them.

    Args:
        groups: to begin with, for all workers.
        patience: checks in a row that must find the same other groups.
    """

    def __init__(self, groups: Groups, patience: int = 2) -> None:
        self.groups = groups
        self._patience = patience
        self._wanted: Groups = ()
        self._times = 0

    def check_speeds(self, seconds: Mapping[int, float]) -> bool:
        """Compare measured times with the groups; returns whether the groups have changed.

        Args:
            seconds: time of a step of the same work, of every worker that has not left.
        """
        wanted = self._right_groups(seconds) if self._out_of_order(seconds) else self.groups
        if _as_sets(wanted) == _as_sets(self.groups):
            self._wanted, self._times = (), 0
            return False
        self._times = self._times + 1 if _as_sets(wanted) == _as_sets(self._wanted) else 1
        self._wanted = wanted
        if self._times < self._patience:
            return False
        self.groups, self._wanted, self._times = wanted, (), 0
        return True

    def leave(self, worker: int) -> None:
        """Forget a worker that has left or died; a group without members disappears."""
        smaller = (tuple(one for one in group if one != worker) for group in self.groups)
        self.groups = tuple(group for group in smaller if group)
        self._wanted, self._times = (), 0

    def _out_of_order(self, seconds: Mapping[int, float]) -> bool:
        times = [[seconds[worker] for worker in group] for group in self.groups]
        if any(max(group) > SPREAD * min(group) for group in times):
            return True
        return any(slow < CLOSE * fast for fast, slow in pairwise(sorted(median(group) for group in times)))

    def _right_groups(self, seconds: Mapping[int, float]) -> Groups:
        workers = sorted(seconds)
        found = group_by_speed([seconds[worker] for worker in workers])
        return tuple(tuple(workers[index] for index in group) for group in found)


def _as_sets(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(group) for group in groups}
