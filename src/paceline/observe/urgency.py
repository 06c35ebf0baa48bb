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


class Urgency:
    """Says when the heartbeats of one process are due before their time.

    That is when a figure is longer than usual, and much longer by itself or together with those of the rounds before.
    """

    __slots__ = ("_last", "_left", "_rounds", "_spreads", "_sums", "_usual")

    def __init__(self, figures: int = 1) -> None:
        self._usual, self._spreads, self._sums = ([0.0] * figures for _ in range(3))
        """Of each figure its usual value, its mean deviation, and the sum of the deviations that count (a cusum)."""
        self._rounds, self._left, self._last = 0, float(BEATS), 0.0

    def note(self, now: float, *seconds: float) -> bool:
        """Take a round; returns whether a heartbeat is due."""
        self._rounds += 1
        is_long = False
        for index, one in enumerate(seconds):
            usual, spread = self._usual[index], self._spreads[index]
            longer = one - usual
            if self._rounds <= _FIRST:
                self._usual[index] += longer / self._rounds
                self._spreads[index] += ((abs(longer) if self._rounds > 1 else 0.0) - spread) / self._rounds
                continue
            least = max(spread, _LEAST * usual) + _LEAST_S
            count = self._sums[index] + min(longer / least, _MOST) - _DRIFT
            self._sums[index] = count = min(2 * _ALARM, max(0.0, count))
            # A long round says little about what is usual; many of them do.
            self._usual[index] += _SHARE * min(longer, 2 * least)
            self._spreads[index] += _SHARE * (min(abs(longer), 3 * least) - spread)
            is_long |= count >= _ALARM and longer >= least
        if not is_long or now - self._last < APART_S:
            return False
        left = min(BEATS, self._left + (now - self._last) / EACH_S)
        if left < 1:
            return False
        self._left, self._last = left - 1, now
        return True
