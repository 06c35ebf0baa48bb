"""Keeps the time in which this process itself did not run apart from the silence of others. Pure."""

from __future__ import annotations

#: Longest turn of a scheduler or a member: twice its usual time on a host that is not busy.
LONGEST_TURN_S = 0.4


class OwnTime:
    """Notices that this process was stopped or stalled: messages of others are still to be read.

    Args:
        now: seconds on the caller's clock.
        longest_turn_s: longest time between two looks at the clock that counts in full.
    """

    def __init__(self, now: float, longest_turn_s: float = LONGEST_TURN_S) -> None:
        self._last, self._longest_turn_s = now, longest_turn_s

    def lost_s(self, now: float) -> float:
        """Return for how long this process did not run since the last call, which is called once in a turn.

        Of a longer time ``longest_turn_s`` counts as time that it ran, so that silence is noticed by a process that is
        slow all the time, too.
        """
        turn, self._last = now - self._last, now
        return max(0.0, turn - self._longest_turn_s)
