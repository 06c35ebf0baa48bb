"""Tells after which rounds a heartbeat is due at once: rounds that are far longer than usual. Pure.

A heartbeat comes every half a second, which is many short rounds. So a round that is worth a word is told when it ends,
if the few beats are not used up that a process may send beside the regular ones: a job that becomes slow for good, or
whose rounds are never alike, costs the scheduler no more than :data:`BEATS` heartbeats, and one more in :data:`EACH_S`.
"""

from __future__ import annotations

#: Heartbeats beside the regular ones, seconds after which there is one more, and seconds between two of them.
BEATS, EACH_S, APART_S = 6, 10.0, 0.1

#: Rounds that tell what is usual, and how much each later one counts.
_FIRST, _SHARE = 5, 0.1

#: Mean deviations that a round may be longer without a count, most that one counts, and the sum of a heartbeat.
_DRIFT, _MOST, _ALARM = 1.5, 7.0, 5.0

#: Part of the usual time that is taken for the least mean deviation, and seconds.
_LEAST, _LEAST_S = 0.05, 0.002


class _Usual:
    """The usual value of a figure of the rounds, and the sum of the deviations from it (a cusum)."""

    __slots__ = ("_spread", "_sum", "_usual")

    def __init__(self) -> None:
        self._usual = self._spread = self._sum = 0.0

    def begin(self, seconds: float, rounds: int) -> None:
        """Take one of the first rounds."""
        longer = seconds - self._usual
        self._usual += longer / rounds
        self._spread += ((abs(longer) if rounds > 1 else 0.0) - self._spread) / rounds

    def note(self, seconds: float) -> bool:
        """Take a round; returns whether it is longer than usual, and much longer alone or with those before."""
        longer = seconds - self._usual
        spread = max(self._spread, _LEAST * self._usual) + _LEAST_S
        self._sum = min(2 * _ALARM, max(0.0, self._sum + min(longer / spread, _MOST) - _DRIFT))
        # A long round says little about what is usual; many of them do.
        self._usual += _SHARE * min(longer, 2 * spread)
        self._spread += _SHARE * (min(abs(longer), 3 * spread) - self._spread)
        return self._sum >= _ALARM and longer >= spread


class Urgency:
    """Says when the heartbeats of one process are due before their time.

    Args:
        figures: number of the figures of a round.
    """

    __slots__ = ("_figures", "_last", "_left", "_rounds")

    def __init__(self, figures: int = 1) -> None:
        self._figures = [_Usual() for _ in range(figures)]
        self._rounds, self._left, self._last = 0, float(BEATS), 0.0

    def note(self, now: float, *seconds: float) -> bool:
        """Take a round; returns whether a heartbeat is due.

        Args:
            now: when it ended.
            *seconds: its figures.
        """
        self._rounds += 1
        if self._rounds <= _FIRST:
            for figure, one in zip(self._figures, seconds, strict=True):
                figure.begin(one, self._rounds)
            return False
        is_long = False
        for figure, one in zip(self._figures, seconds, strict=True):
            is_long |= figure.note(one)
        if not is_long or now - self._last < APART_S:
            return False
        left = min(BEATS, self._left + (now - self._last) / EACH_S)
        if left < 1:
            return False
        self._left, self._last = left - 1, now
        return True
