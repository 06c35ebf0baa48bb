"""A trace of the job: members send their events while it runs, and its caller fetches them. Pure.

| state | event | next |
|---|---|---|
| none, over | a request with a new number | starting: heartbeats are answered with the number |
| starting | every live member has sent events | running: a worker's rounds count from its next events on |
| running | every live worker has made the rounds | ending |
| ending | every live member has sent events that it took later | over |
| any but over | the deadline, :data:`MAX_BYTES`, :data:`MAX_PARTS`, or an asker that has gone | over: says why |
| over | a request for the events after the last part | over; the events are forgotten |
| over | a request with a new number, once the events are forgotten or their asker has gone | starting |

Other requests change nothing: they may come again and again. An asker that sent no request for :data:`GONE_S` has gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.membership.effects import MemberKey
from paceline.naming import workers_text
from paceline.wire import messages as m
from paceline.wire.limits import MAX_TRACE_BYTES

#: Bytes of all events of a trace, and those of one answer; and parts of a trace, which take memory without events, too.
MAX_BYTES, MAX_ANSWER_BYTES, MAX_PARTS = 64 << 20, 1 << 20, 1 << 16

#: Seconds without a request after which an asker has gone, and after which its events are forgotten.
GONE_S, KEPT_S = 10.0, 60.0


@dataclass
class _Trace:
    """One trace."""

    number: int
    rounds: int
    deadline: float
    asked: float
    """When its asker was heard."""
    parts: list[m.TracePart] = field(default_factory=list)
    size: int = 0
    begun: set[MemberKey] = field(default_factory=set)
    began: float | None = None
    """When it began to run."""
    first: dict[int, int] = field(default_factory=dict)
    """The workers' rounds in the first events that they took since."""
    awaited: set[MemberKey] | None = None
    """While it ends: the members whose last events have not come."""
    ending: float = 0.0
    """When it began to end."""
    waits_for: list[int] = field(default_factory=list)
    """The workers that have not made the rounds."""
    is_over: bool = False
    says: str = ""


class Traces:
    """The trace of a job; there is one at a time."""

    def __init__(self) -> None:
        self._trace: _Trace | None = None

    @property
    def number(self) -> int:
        """The trace that members send events for; 0: none."""
        return 0 if self._trace is None or self._trace.is_over else self._trace.number

    def ask(self, ask: m.AskTrace, now: float) -> m.Reply:
        """Answer a request: begin the trace if it is new, and return parts."""
        trace = self._trace
        if trace is None or (trace.number != ask.number and self._makes_room(trace, now)):
            trace = self._trace = _Trace(ask.number, ask.rounds, now + ask.timeout_s, now)
        if trace.number != ask.number:
            left_s = max(trace.deadline, trace.asked + GONE_S) - now
            text = f"another trace of this job runs, for {left_s:.0f} s at most; wait for its end"
            return m.Failed("ProtocolError", text)
        trace.asked = now
        most = MAX_ANSWER_BYTES // MAX_TRACE_BYTES
        found = trace.parts[ask.part : ask.part + most]
        if trace.is_over and not found:
            trace.parts = []
        return m.TraceIs(found, trace.is_over and not found, trace.says)

    def _makes_room(self, trace: _Trace, now: float) -> bool:
        return trace.is_over and (not trace.parts or now - trace.asked > GONE_S)

    def note(self, member: m.Member, events: m.TraceEvents, live: Mapping[MemberKey, int], now: float) -> None:
        """Take a member's events.

        Args:
            member: their sender.
            events: events of this trace, or of another one.
            live: the live members, and their rounds.
            now: the time; events that were under way when the trace began to run or to end count as those before.
        """
        trace, key = self._trace, (member.role, member.rank)
        rounds = {rank: round for (role, rank), round in live.items() if role == "worker"}
        if trace is None or trace.is_over or events.trace != trace.number:
            return
        if events.records or key not in trace.begun:
            trace.parts.append(m.TracePart(member.role, member.rank, member.host, member.pid, events))
        trace.size += len(events.records)
        trace.begun.add(key)
        taken = events.until + events.offset - events.error
        if trace.began is None:
            trace.began = now if live and trace.begun >= live.keys() else None
        elif trace.awaited is None:
            if member.role == "worker" and key in live and taken >= trace.began:
                trace.first.setdefault(member.rank, live[key])
            trace.awaited, trace.ending = None if self._missing(trace, rounds) else set(live), now
        else:
            trace.awaited = (trace.awaited - ({key} if taken >= trace.ending else set())) & live.keys()
            trace.is_over = not trace.awaited
        if trace.size > MAX_BYTES:
            self._end(trace, f"it has {trace.size >> 20} MiB of events, and ends early")
        elif len(trace.parts) >= MAX_PARTS:
            self._end(trace, f"it has the events of {MAX_PARTS} heartbeats, and ends early")
        trace.waits_for = self._missing(trace, rounds)

    def _missing(self, trace: _Trace, rounds: Mapping[int, int]) -> list[int]:
        """Return the workers that have not made the rounds: one more than wanted, since the first is not whole."""
        return [rank for rank, round in rounds.items() if round <= trace.first.get(rank, round) + trace.rounds]

    def tick(self, now: float) -> None:
        """End a trace that is late or whose asker has gone, and forget events that are not fetched."""
        trace = self._trace
        if trace is None:
            return
        if not trace.is_over and now > trace.deadline:
            missing = workers_text(trace.waits_for) if trace.waits_for else "some members"
            self._end(trace, f"{missing} did not make {trace.rounds} rounds in time; raise --timeout")
        elif not trace.is_over and now - trace.asked > GONE_S:
            self._end(trace, f"its asker was not heard for {GONE_S:g} s, and it ends early")
        if now - trace.asked > KEPT_S:
            trace.parts = []

    def _end(self, trace: _Trace, why: str) -> None:
        trace.is_over, trace.says = True, why
