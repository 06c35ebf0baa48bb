"""The times at which workers' speeds are compared with the present groups: in rounds of the slowest worker. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.membership.roster import MemberRecord

#: Rounds of the slowest worker before the first check: medians of fewer are too noisy.
FIRST_CHECK = 25


class Checks:
    """Tells when a check is due.

    Args:
        interval: rounds of the slowest worker between two checks; 0: there are none.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._next = interval, FIRST_CHECK

    def is_due(self, live: Sequence[MemberRecord]) -> bool:
        """Tell whether a check is due now; then it counts as made.

        Args:
            live: the workers that have neither left nor died.
        """
        if not self._interval or not live or min(one.round for one in live) < self._next:
            return False
        if not all(0 < number < math.inf for one in live for number in (one.usual_s, one.usual_samples)):
            return False
        self._next = min(one.round for one in live) + self._interval
        return True
