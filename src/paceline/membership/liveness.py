"""Tells a dead host, a stopped process and a stalled process apart. Pure.

A silent member is one that sends no heartbeats. What becomes of it depends on what else is known of it:

| its process is silent for | the kernel of its host | its state in /proc | verdict |
|---|---|---|---|
| < ``heartbeat_timeout_s`` | any | any | alive |
| longer | is silent for as long | any | dead: its host was not heard |
| longer | is heard, or not known | T | dead: its process is stopped |
| longer | is heard, or not known | t | alive, with a warning: a debugger holds it |
| longer | is heard, or not known | other, or not known | alive, with a warning: it is stalled |
| > ``stall_timeout_s`` | is heard, or not known | other than t, or not known | dead: it is stalled |

Before all members have joined, nobody sends heartbeats: then only the second line counts.

The kernel is known where the transport knows it (:mod:`paceline.transport.keepalive`). The state is known where a
process of the same host looks: the scheduler itself, or a member whose heartbeat says what it saw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.config import Settings, variable
from paceline.membership.actions import Action, Warn
from paceline.membership.own_time import OwnTime
from paceline.membership.seat import Seat
from paceline.wire import messages as m

#: Share of ``heartbeat_timeout_s`` after which a silent member is a suspect, whose host and state are looked at.
SUSPECT_SHARE = 0.5

#: How long a sighting of another member counts, beside two of its heartbeats.
_SIGHTING_SLACK_S = 0.5

_STATES = {
    "T": "its process is stopped",
    "t": "a debugger holds its process",
    "D": "its process waits in the kernel, for instance for a disk",
}
_STALLED = "its process is stalled, for instance in a call that holds Python's lock"


@dataclass(frozen=True)
class Suspect:
    """A silent member, of which the scheduler wants to know more."""

    role: str
    rank: int
    peer: bytes
    pid: int
    host_id: str


class Liveness:
    """Judges the members of a job.

    Args:
        settings: with the time limits.
        now: seconds on the caller's clock.
    """

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._own_time = OwnTime(now)

    # ---- what is known -----------------------------------------------------------------------------------------------

    def turn(self, seats: Iterable[Seat], now: float) -> None:
        """Begin to judge: the time in which this process itself did not run is no silence of others."""
        lost_s = self._own_time.lost_s(now)
        for seat in seats if lost_s else ():
            seat.heard = min(now, seat.heard + lost_s)
            if seat.closed_since is not None:
                seat.closed_since = min(now, seat.closed_since + lost_s)

    def suspects(self, seats: Iterable[Seat], now: float) -> list[Suspect]:
        """Return the members of which more should be known."""
        return [
            Suspect(one.member.role, one.member.rank, one.peer, one.member.pid, one.member.host_id)
            for one in seats
            if self._is_suspect(one, now)
        ]

    def suspects_near(self, near: Seat, seats: Iterable[Seat], now: float) -> list[m.Suspect]:
        """Return the suspects on a member's host, for its news."""
        found = [one for one in self.suspects(seats, now) if one.host_id == near.member.host_id]
        return [m.Suspect(one.role, one.rank, one.pid) for one in found]

    def note_state(self, seat: Seat, state: str, now: float) -> None:
        """Note what was seen of a member's process."""
        seat.state, seat.state_at = state, now

    def note_heard(self, seat: Seat, now: float) -> list[Action]:
        """Note that a member was heard; returns a line for the log if it was silent for long."""
        silent_s, was_silent = now - seat.heard, seat.warned
        seat.heard, seat.warned = now, False
        return [Warn(f"{seat} was heard again after {silent_s:.1f} s")] if was_silent else []

    def _is_suspect(self, seat: Seat, now: float) -> bool:
        """Tell whether more should be known of a member."""
        silent = now - seat.heard > SUSPECT_SHARE * self._settings.heartbeat_timeout_s
        return seat.live and seat.goodbye_since is None and silent

    # ---- verdicts ----------------------------------------------------------------------------------------------------

    def why_dead(self, seat: Seat, is_complete: bool, now: float) -> str:
        """Return the reason why a member counts as dead now, or an empty string."""
        if not seat.live or seat.goodbye_since is not None:
            return ""
        if seat.closed_since is not None:
            return self._why_closed(seat, now)
        return self._why_silent(seat, is_complete, now)

    def _why_closed(self, seat: Seat, now: float) -> str:
        assert seat.closed_since is not None
        closed_s = now - seat.closed_since
        if closed_s > self._settings.disconnect_grace_s:
            if seat.code is not None:
                return f"its process ended with exit code {seat.code} and did not leave the job before"
            return f"its connection closed {closed_s:.1f} s ago and it did not come back"
        return ""

    def _why_silent(self, seat: Seat, is_complete: bool, now: float) -> str:
        silent_s, limit_s = now - seat.heard, self._settings.heartbeat_timeout_s
        if silent_s <= limit_s:
            return ""
        if seat.host_silent_s is not None and seat.host_silent_s > limit_s:
            return f"its host was not heard for {min(silent_s, seat.host_silent_s):.1f} s"
        state = self._state(seat, now)
        if not is_complete or state == "t":
            return ""
        if state == "T":
            return f"{_STATES[state]} and was not heard for {silent_s:.1f} s"
        if silent_s > self._settings.stall_timeout_s:
            return (
                f"it was not heard for {silent_s:.1f} s{_although(seat)}: {_STATES.get(state, _STALLED)}; "
                f"if that is normal here, raise {variable('stall_timeout_s')}"
            )
        return ""

    def warnings(self, seats: Iterable[Seat], now: float) -> list[Action]:
        """Return a line for each member that is silent and not dead; one for each silence."""
        silent = [one for one in seats if not one.warned and one.closed_since is None and self._is_late(one, now)]
        for seat in silent:
            seat.warned = True
        return [Warn(self._warning(seat, now)) for seat in silent]

    def _is_late(self, seat: Seat, now: float) -> bool:
        return self._is_suspect(seat, now) and now - seat.heard > self._settings.heartbeat_timeout_s

    def _warning(self, seat: Seat, now: float) -> str:
        state, limit = self._state(seat, now), f"{self._settings.stall_timeout_s:g} s ({variable('stall_timeout_s')})"
        until = "" if state == "t" else f"; the job fails after {limit}"
        why = _STATES.get(state, _STALLED)
        return f"{seat} was not heard for {now - seat.heard:.1f} s{_although(seat)}: {why}{until}"

    def _state(self, seat: Seat, now: float) -> str:
        valid_s = 2 * self._settings.heartbeat_interval_s + _SIGHTING_SLACK_S
        return seat.state if now - seat.state_at <= valid_s else ""


def _although(seat: Seat) -> str:
    return "" if seat.host_silent_s is None else " although its host answers"
