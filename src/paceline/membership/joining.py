"""How long processes may take until they join the job, on a busy host too. Pure.

Where a launcher tells how much CPU time each process has used (and all that it has started), the time that counts is
that of :mod:`paceline.host.start_clock`.

A process without a report was never started, or no launcher sees it: the time that passed counts. When
``start_timeout_s`` has counted for a process, the job fails and names it. So a process that computes and never joins is
named after as much CPU time, which on an idle host is as much time. A process that has ended will not join any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import variable
from paceline.host.exitcodes import describe_code
from paceline.host.start_clock import StartClock
from paceline.membership.effects import MOST_NAMED, MemberKey
from paceline.naming import listed
from paceline.wire import messages as m


class Starting:
    """The processes that have not joined yet.

    Attributes:
        death: the first process that ended before it joined.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s, self._began = limit_s, now
        self._unknown = StartClock(now)
        self._clocks: dict[MemberKey, StartClock] = {}
        self._next_word = now + limit_s / 2
        self.death: m.Death | None = None

    def note_ended(self, role: str, rank: int, code: int) -> m.Death:
        """Note that a process has ended; returns the first one that has."""
        text = f"its process ended before it joined: {describe_code(code)}"
        self.death = self.death or m.Death(role, rank, "", text)
        return self.death

    def note_cpu(self, key: MemberKey, cpu_s: float, now: float, is_ready: bool) -> None:
        """Note how much CPU time a process has used since it started, and whether it is ready to run."""
        self._clocks.setdefault(key, StartClock(self._began)).note(cpu_s, now, is_ready)

    def forgive(self, lost_s: float) -> None:
        """Do not count time in which the judge did not run."""
        for clock in (self._unknown, *self._clocks.values()):
            clock.forgive(lost_s)

    def late(self, missing: Sequence[MemberKey], now: float) -> list[MemberKey]:
        """Return those of the missing processes whose time is over."""
        late = {key for key, clock in self._clocks.items() if clock.counted_s(now) >= self._limit_s}
        unknown_are_late = self._unknown.counted_s(now) >= self._limit_s
        if not late and not unknown_are_late:  # nearly always: thousands need not be looked through
            return []
        return [key for key in missing if (key in late if key in self._clocks else unknown_are_late)]

    def is_word_due(self, now: float) -> bool:
        """Tell, twice in ``start_timeout_s``, that waiting members should hear that the wait goes on."""
        is_due = now >= self._next_word
        if is_due:
            self._next_word = now + self._limit_s / 2
        return is_due

    def waited_for(self, missing: Sequence[MemberKey], now: float, why: str = "") -> str:
        """Return a sentence about the missing processes that take longer than usual; empty while none does.

        ``why`` is why they have not joined, if that is known.
        """
        waited_s = now - self._began
        if waited_s < self._limit_s:
            return ""
        names = (f"{role} {rank} ({self._clock((role, rank)).cpu_s:.1f} s of CPU time)" for role, rank in missing)
        busy = f", and still starts on a busy host; {variable('start_timeout_s')} counts the CPU time that it gets"
        return f"{listed(names, MOST_NAMED)} did not join within {waited_s:.0f} s{f': {why}' if why else busy}"

    def too_late(self, late: Sequence[MemberKey], why: str = "") -> str:
        """Return the sentence with which the start fails, about the processes whose time is over."""
        names = listed((f"{role} {rank}" for role, rank in late), MOST_NAMED)
        way_out = f"; look at their output, or raise {variable('start_timeout_s')}"
        return f"{names} did not join within {self._limit_s:g} s{f': {why}' if why else way_out}"

    def _clock(self, key: MemberKey) -> StartClock:
        return self._clocks.get(key, self._unknown)
