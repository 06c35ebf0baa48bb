"""The distance between two clocks, from the round trips of messages. Pure.

A message leaves at ``sent``, the peer's clock shows ``there`` at some moment before the answer arrives at ``came``. So
the peer's clock is ahead by ``there - came`` at least and ``there - sent`` at most: by their middle, with an error of
at most half of the round trip, whichever way was the slower one (Cristian, 1989). The best round trip counts; its error
grows by :data:`DRIFT` with its age, so that a later one takes its place.
"""

from __future__ import annotations

import math

#: Seconds per second by which two clocks may run apart: quartz has up to 100 ppm, and each clock is one.
DRIFT = 2e-4

#: Turns in an interval in which members of one job do the same work, each in that of its rank.
TURNS = 4

#: Part of an interval below which a turn is too soon: the distance of the clocks was just found to be another one.
_TOO_SOON = 1 / 8


class RoundTrips:
    """Compares the own clock with a peer's. Times are seconds.

    Args:
        is_same_clock: both run on one host, whose processes have one clock.

    Attributes:
        offset: the peer's clock less the own one.
    """

    def __init__(self, is_same_clock: bool = False) -> None:
        self.offset = 0.0
        self._is_same_clock = is_same_clock
        self._error, self._at = math.inf, 0.0

    def note(self, sent: float, there: float, came: float) -> None:
        """Take a round trip: sent and came on the own clock, there on the peer's."""
        offset, error = there - (sent + came) / 2, (came - sent) / 2
        if self._is_same_clock and abs(offset) <= error + 1e-6:
            offset, error = 0.0, 0.0
        if error <= self.error(came):
            self.offset, self._error, self._at = offset, error, came

    def error(self, now: float) -> float:
        """Return the bound of the offset's error; infinite before the first round trip."""
        return self._error if self._error == 0.0 else self._error + DRIFT * (now - self._at)

    def next_turn(self, now: float, interval: float, rank: int) -> float:
        """Return when the next turn of a rank begins: at the same moment as for others that know the peer's clock.

        What arrives together at the peer is dealt with in a part of the time that it takes one by one, as code and data
        are in the processor's caches then. Ranks are dealt to :data:`TURNS` turns.
        """
        shift = self.offset - rank % TURNS / TURNS * interval
        return (math.floor((now + shift) / interval + _TOO_SOON) + 1) * interval - shift
