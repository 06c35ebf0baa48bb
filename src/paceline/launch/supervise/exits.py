"""Judges processes that are to exit: those that hang, not those that are slow. Pure.

| a process | is waited for |
|---|---|
| uses CPU time, itself or by its descendants | without a limit |
| uses none | ``idle_s`` |
| is stopped (SIGSTOP) | ``leave_s`` |

The loop looks every ``LOOK_S``. Time in which the launcher itself did not run counts as at most two looks, because the
others may not have run either. Progress is ``MOVED_S`` of CPU time since the last progress: threads that only
wake up now and then make none.

What breaks the guarantee: a process that computes for ever is waited for, as a script that trains for ever is. A line
every ``SAY_S`` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.launch.job_spec import Graces
from paceline.launch.plan import ProcessName
from paceline.launch.supervise.events import Runs

#: Interval at which processes that are to exit are looked at, and named.
LOOK_S, SAY_S = 2.0, 30.0

#: CPU time that is progress: a process that wants to run gets it within ``idle_s`` on any machine.
MOVED_S = 0.1


@dataclass
class _Seen:
    at: float
    cpu_s: float
    """Its CPU time at its last progress."""
    idle_s: float = 0.0
    stopped_s: float = 0.0


class Exits:
    """The processes that are to exit since a time."""

    def __init__(self, graces: Graces, now: float) -> None:
        self._graces = graces
        self._began = self._said = now
        self._seen: dict[ProcessName, _Seen] = {}

    def note(self, runs: Runs, is_stopped: bool, now: float) -> None:
        """Note a process's CPU time until now, and whether it is stopped."""
        one = self._seen.setdefault(runs.member, _Seen(now, runs.cpu_s))
        passed_s, one.at = min(now - one.at, 2 * LOOK_S), now
        one.stopped_s = one.stopped_s + passed_s if is_stopped else 0.0
        one.idle_s += passed_s
        if runs.is_ready or abs(runs.cpu_s - one.cpu_s) >= MOVED_S:
            one.cpu_s, one.idle_s = runs.cpu_s, 0.0

    def why_overdue(self, member: ProcessName) -> str:
        """Return why a process is waited for no more, or an empty string."""
        one = self._seen.get(member, _Seen(0.0, 0.0))
        if one.stopped_s >= self._graces.leave_s:
            return f"stopped (SIGSTOP), and the job has waited for its exit for {one.stopped_s:.3g} s"
        if one.idle_s >= self._graces.idle_s:
            return (
                f"did not exit, and has used no CPU time for {one.idle_s:.3g} s: an exit handler or a thread of it "
                "hangs; if that is normal here, raise --timeout"
            )
        return ""

    def waiting(self, places: Mapping[ProcessName, str], now: float) -> str:
        """Return a line about the processes that are waited for, if one is due."""
        if now - self._said < SAY_S:
            return ""
        self._said = now
        names = ", ".join(f"{member} ({place})" if place else str(member) for member, place in places.items())
        return f"all workers have left the job; waiting {now - self._began:.0f} s for the exit of {names}"
