"""The steps of several processes and the members that they waited for, from their events. Pure.

A request between two processes has four events: its asker sends it, the asked one takes it, answers it, and the asker
gets the answer. They are matched by both members and the request's number, so no clock is needed for that. They show
the member that a wait was for: the asked one answers in the moment in which the last request comes that was missing, so
the worker waited for the sender of the request that the asked one took last before its answer. Where that sender is the
waiting worker itself, it waited for the server.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from paceline.observe.account import WAIT, parts_of
from paceline.observe.events import ANSWERED, DIED, GOT, PART, ROLES, ROUND, SENT, TOOK, Event, Source, member_of

MemberKey: TypeAlias = tuple[str, int]


class Slice(NamedTuple):
    """A part of a step; its end is that of the next one's begin."""

    part: int
    begin: float
    end: float
    thread: int


class TracedRequest(NamedTuple):
    """The four events of a request, of which each may be missing."""

    asker: MemberKey
    asked: MemberKey
    sent: Event | None
    took: Event | None
    answered: Event | None
    got: Event | None

    @property
    def is_whole(self) -> bool:
        """Whether all of it is known."""
        return None not in (self.sent, self.took, self.answered, self.got)


@dataclass
class TracedProcess:
    """The events of a process, in their order; times are those of the scheduler's clock."""

    source: Source
    events: list[Event] = field(repr=False)
    is_alive: bool = True
    lost: int = 0

    @property
    def key(self) -> MemberKey:
        """Role and rank."""
        return self.source.role, self.source.rank

    @property
    def parts(self) -> Sequence[str]:
        """Names of the parts of its time."""
        return parts_of(self.source.role)

    @cached_property
    def slices(self) -> list[Slice]:
        """The parts of its time; the last one lasts until its last event."""
        switches = [one for one in self.events if one.kind == PART and one.number < len(self.parts)]
        ends = [one.time for one in switches[1:]] + [self.events[-1].time] if switches else []
        return [
            Slice(one.number, one.time, max(end, one.time), one.thread) for one, end in zip(switches, ends, strict=True)
        ]

    @cached_property
    def _taken(self) -> list[Event]:
        return [one for one in self.events if one.kind == TOOK]

    def taken_before(self, event: Event) -> Event | None:
        """Return the request that it took last before an event; None: there was none."""
        index = bisect_left(self._taken, event.order, key=lambda one: one.order) - 1
        return self._taken[index] if index >= 0 else None


def aligned(source: Source, events: Iterable[Event], is_alive: bool = True, lost: int = 0) -> TracedProcess:
    """Return a process on the scheduler's clock; in its own order, without repeats."""
    by_order = {one.order: one._replace(time=one.time + source.offset) for one in events}
    return TracedProcess(source, [by_order[order] for order in sorted(by_order)], is_alive, lost)


class EventOrder:
    """The events of several processes.

    Attributes:
        processes: by role and rank, scheduler first.
        requests: all requests, by asker, asked member and number.
    """

    def __init__(self, processes: Iterable[TracedProcess]) -> None:
        ordered = sorted(processes, key=lambda one: (ROLES.index(one.source.role), one.source.rank))
        self.processes: dict[MemberKey, TracedProcess] = {one.key: one for one in ordered}
        self.requests = self._matched()

    def _matched(self) -> dict[tuple[MemberKey, MemberKey, int], TracedRequest]:
        found: dict[tuple[MemberKey, MemberKey, int], dict[str, Event]] = {}
        fields = {SENT: "sent", GOT: "got", TOOK: "took", ANSWERED: "answered"}
        for key, process in self.processes.items():
            for one in process.events:
                if one.kind in fields and one.number:
                    peer = member_of(one.peer)
                    way = (key, peer) if one.kind in (SENT, GOT) else (peer, key)
                    found.setdefault((*way, one.number), {})[fields[one.kind]] = one
        empty = dict.fromkeys(fields.values())
        return {way: TracedRequest(way[0], way[1], **{**empty, **events}) for way, events in found.items()}

    @cached_property
    def rounds(self) -> Mapping[MemberKey, int]:
        """The last round of each worker."""
        last = {key: [one.number for one in made.events if one.kind == ROUND] for key, made in self.processes.items()}
        return {key: max(numbers) for key, numbers in last.items() if numbers}

    @cached_property
    def _got(self) -> Mapping[MemberKey, list[tuple[float, TracedRequest]]]:
        """By asker, the requests whose answers came, in that order."""
        found: dict[MemberKey, list[tuple[float, TracedRequest]]] = {}
        for one in self.requests.values():
            if one.got is not None:
                found.setdefault(one.asker, []).append((one.got.time, one))
        return {key: sorted(ones, key=lambda one: one[0]) for key, ones in found.items()}

    @cached_property
    def pending(self) -> Mapping[MemberKey, list[tuple[Event, TracedRequest]]]:
        """By asker, the requests whose answers did not come, and when each was sent."""
        found: dict[MemberKey, list[tuple[Event, TracedRequest]]] = {}
        for one in self.requests.values():
            if one.sent is not None and one.got is None:
                found.setdefault(one.asker, []).append((one.sent, one))
        return found

    @cached_property
    def dead(self) -> frozenset[MemberKey]:
        """The members of whose death a process has heard."""
        events = (one for process in self.processes.values() for one in process.events)
        return frozenset(member_of(one.peer) for one in events if one.kind == DIED)

    def waited_for(self, key: MemberKey, wait: Slice) -> MemberKey | None:
        """Return the member that a wait was for: by its last answer, or by the requests that are still open."""
        got = self._got.get(key, [])
        last = bisect_right(got, wait.end, key=lambda one: one[0]) - 1
        if last >= 0 and got[last][0] >= wait.begin:
            return self._cause(got[last][1])
        pending = self.pending.get(key)
        return self._missing(pending[-1][1]) if pending else None

    def _missing(self, request: TracedRequest) -> MemberKey:
        """Return the worker that is furthest behind, if the asked one has taken a request and not answered it."""
        rounds = self.rounds
        behind = min(rounds, key=lambda one: rounds[one], default=request.asker)
        is_held = request.took is not None and request.answered is None
        return behind if is_held and rounds.get(behind, 0) < rounds.get(request.asker, 0) else request.asked

    def _cause(self, request: TracedRequest) -> MemberKey:
        """Return the sender of the last request that the asked one took before it answered this one."""
        asked = self.processes.get(request.asked)
        if asked is None or request.answered is None:
            return request.asked
        last = asked.taken_before(request.answered)
        if last is None or last is request.took:
            return request.asked
        sender = member_of(last.peer)
        whole = self.requests.get((sender, request.asked, last.number))
        if sender[0] == "server" and sender in self.processes and whole is not None and whole.sent is not None:
            # a sum that another server has made: the last worker before it has completed it
            first = self.processes[sender].taken_before(whole.sent)
            return sender if first is None else member_of(first.peer)
        return sender

    def waits(self, process: TracedProcess) -> list[tuple[Slice, MemberKey | None]]:
        """Return the waits of a worker, each with the member that it was for."""
        if process.source.role != "worker":
            return []
        return [(one, self.waited_for(process.key, one)) for one in process.slices if one.part == WAIT]


def member_name(key: MemberKey) -> str:
    """Return the name of a member."""
    return "scheduler" if key[0] == "scheduler" else f"{key[0]} {key[1]}"
