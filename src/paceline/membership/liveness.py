"""Tells a dead process, a silent host, a stopped process and a stalled one apart. Pure.

Noticing is not giving up. A member that sends no heartbeats for ``heartbeat_timeout_s`` is named in the log and in
``paceline status``. It counts as dead when something proves it, or when it was silent for ``stall_timeout_s``:

| its connection | other knowledge of its process | it is dead |
|---|---|---|
| any | it is gone | :data:`LAST_WORDS_S` after it was heard last: its last messages may be still to be read |
| closed | nothing | ``disconnect_grace_s`` after it closed |
| closed | it runs | ``stall_timeout_s`` after it was heard last |
| open | it is stopped, stalled, or its host is silent | ``stall_timeout_s`` after it was heard last |
| open | a debugger holds it | ``stall_timeout_s`` after the debugger was seen last |

A process is *gone* if the launcher has told its exit code, a process of its host finds it no more in /proc, or the
kernel of its host refuses connections to its port (only a scheduler's port is tried). It *runs* if a process of its
host sees it in /proc, or if a launcher watches over it, which would have told its exit code.

The kernel of a host tells whether the host is silent, where the transport asks it
(:mod:`paceline.net.endpoints`). The scheduler itself looks at /proc, or a member that says so with its heartbeat.
Before all members have joined, they send no heartbeats: then a member is as silent as its host.

The time in which the judge itself did not run is no silence of others (:mod:`paceline.host.own_time`). Nor is the
time in which a process of its host sees a member ready to run and its kernel does not run it: between such a sighting
and the one before only the CPU time that the member has used counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.config import Settings, variable
from paceline.host.own_time import OwnTime
from paceline.membership.effects import Action, Warn
from paceline.membership.roster import MemberRecord

#: Share of ``heartbeat_timeout_s`` after which a silent member is a suspect, whose host and state are looked at.
SUSPECT_SHARE = 0.5

#: The same after which the kernel of its host is asked, which is a system call: early enough that the answer tells most
#: of the silence of a suspect.
_QUIET_SHARE = 0.25

#: How long a sighting of another member counts, beside two of its heartbeats.
_SIGHTING_SLACK_S = 0.5

#: How long it may take to read the last messages of a process that has ended.
LAST_WORDS_S = 1.5

#: States of a process that does not exist any more: no entry in /proc, or one that its parent has not removed.
GONE = ("X", "Z")

#: State of a process that runs, or waits for a processor.
READY = "R"

_STATES = {
    "T": "its process is stopped",
    "t": "a debugger holds its process",
    "D": "its process waits in the kernel, for instance for a disk",
    READY: "its process waits for a processor, or computes in a call that holds Python's lock",
}
_STALLED = "its process is stalled, for instance in a call that holds Python's lock"


class Liveness:
    """Judges the members of a job."""

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._own_time = OwnTime(now)
        self._is_supervised = False

    # ---- knowledge ---------------------------------------------------------------------------------------------------

    def turn(self, records: Iterable[MemberRecord], now: float, is_supervised: bool = False) -> float:
        """Begin to judge; returns for how long this process did not run, which is no silence of others.

        Args:
            records: the members.
            now: seconds on the caller's clock.
            is_supervised: a launcher tells the exit code of every process.
        """
        self._is_supervised = is_supervised
        lost_s = self._own_time.lost_s(now)
        for record in records if lost_s else ():
            record.heard = min(now, record.heard + lost_s)
            if record.closed_since is not None:
                record.closed_since = min(now, record.closed_since + lost_s)
        return lost_s

    def suspects(self, records: Iterable[MemberRecord], now: float) -> list[MemberRecord]:
        """Return the members of which more should be known."""
        return [one for one in records if self._is_suspect(one, now)]

    def is_quiet(self, record: MemberRecord, now: float) -> bool:
        """Tell whether the kernel of a member's host should be asked for how long it is silent."""
        return record.live and now - record.heard > _QUIET_SHARE * self._settings.heartbeat_timeout_s

    def note_state(self, record: MemberRecord, state: str, cpu_s: float, now: float) -> None:
        """Note the state in which a member's process was seen, and the CPU time that it has used since it began."""
        used_s = max(0.0, cpu_s - record.cpu_s)
        if state == READY and record.state_at > record.heard:
            record.starved_s += max(0.0, now - record.state_at - used_s)
        record.state, record.state_at, record.cpu_s = state, now, record.cpu_s + used_s
        record.held_at = now if state == "t" else record.held_at
        record.sightings, record.ready = record.sightings + 1, record.ready + (state == READY)

    def note_heard(self, record: MemberRecord, now: float) -> list[Action]:
        """Note that a member was heard; returns a line for the log if it was silent for long."""
        silent_s, was_silent = now - record.heard, record.warned
        record.heard, record.starved_s, record.warned = now, 0.0, False
        record.sightings = record.ready = 0
        return [Warn(f"{record} was heard again after {silent_s:.1f} s")] if was_silent else []

    def _is_suspect(self, record: MemberRecord, now: float) -> bool:
        """Tell whether more should be known of a member."""
        silent = now - record.heard > SUSPECT_SHARE * self._settings.heartbeat_timeout_s
        return record.live and record.goodbye_since is None and (silent or record.closed_since is not None)

    def _silent_s(self, record: MemberRecord, is_complete: bool, now: float) -> float:
        """Return for how long a member is silent, of those that should not be."""
        if is_complete or record.closed_since is not None:
            return now - record.heard
        return min(now - record.heard, record.host_silent_s or 0.0)

    def _state(self, record: MemberRecord, now: float) -> str:
        valid_s = 2 * self._settings.beat_interval_s + _SIGHTING_SLACK_S
        return record.state if now - record.state_at <= valid_s else ""

    def _state_of_most(self, record: MemberRecord, now: float) -> str:
        """Return the state for people. Threads of a stalled process wake now and then, so one sighting tells little."""
        state = self._state(record, now)
        return (READY if 2 * record.ready > record.sightings else "S") if state in (READY, "S") else state

    # ---- verdicts ----------------------------------------------------------------------------------------------------

    def why_dead(self, record: MemberRecord, is_complete: bool, now: float) -> str:
        """Return the reason why a member counts as dead now, or an empty string."""
        if not record.live or record.goodbye_since is not None:
            return ""
        closed = record.closed_since
        is_gone = record.code is not None or self._state(record, now) in GONE
        if is_gone and now - (record.heard if closed is None else closed) > LAST_WORDS_S:
            return _how_gone(record)
        if closed is not None and self._is_unknown(record, now) and now - closed > self._settings.disconnect_grace_s:
            return _closed(record, now)
        silent_s = self._silent_s(record, is_complete, now)
        if min(silent_s - record.starved_s, now - record.held_at) <= self._settings.stall_timeout_s:
            return ""
        why = self._why_silent(record, silent_s, now)
        return f"{why}; if that is normal here, raise {variable('stall_timeout_s')}"

    def _is_unknown(self, record: MemberRecord, now: float) -> bool:
        """Tell whether it is unknown if a member's process runs."""
        return not (self._state(record, now) or self._is_supervised)

    def _why_silent(self, record: MemberRecord, silent_s: float, now: float) -> str:
        """Return for how long a member is silent, and why as far as that is known."""
        if record.closed_since is not None:
            return _closed(record, now)
        if (record.host_silent_s or 0.0) > SUSPECT_SHARE * self._settings.heartbeat_timeout_s:
            return f"its host was not heard for {silent_s:.1f} s"
        although = "" if record.host_silent_s is None else " although its host answers"
        why = _STATES.get(self._state_of_most(record, now), _STALLED)
        return f"it was not heard for {silent_s:.1f} s{although}: {why}"

    def warnings(self, records: Iterable[MemberRecord], is_complete: bool, now: float) -> list[Action]:
        """Return a line for each member that is silent and not dead; one for each silence."""
        silent = [one for one in records if not one.warned and self._is_late(one, is_complete, now)]
        for record in silent:
            record.warned = True
        return [Warn(self._warning(record, is_complete, now)) for record in silent]

    def _is_late(self, record: MemberRecord, is_complete: bool, now: float) -> bool:
        return self._is_suspect(record, now) and (
            self._silent_s(record, is_complete, now) > self._settings.heartbeat_timeout_s
        )

    def _warning(self, record: MemberRecord, is_complete: bool, now: float) -> str:
        is_given_up_soon = record.closed_since is not None and self._is_unknown(record, now)
        name = "disconnect_grace_s" if is_given_up_soon else "stall_timeout_s"
        limit = f"{getattr(self._settings, name):g} s ({variable(name)})"
        state = self._state_of_most(record, now)
        until = "" if state == "t" else f"; it counts as dead after {limit}"
        until += ", less the time in which it waits for a processor" if state == READY else ""
        return f"{record}: {self._why_silent(record, self._silent_s(record, is_complete, now), now)}{until}"


def _how_gone(record: MemberRecord) -> str:
    if record.code is None:
        return "its process has ended, and did not leave the job before"
    return f"its process ended with exit code {record.code} and did not leave the job before"


def _closed(record: MemberRecord, now: float) -> str:
    assert record.closed_since is not None
    return f"its connection closed {now - record.closed_since:.1f} s ago and it did not come back"
