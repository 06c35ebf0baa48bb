"""The last seconds of a job as lines: events, waits and deaths of its members. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from paceline.observe.account import WAIT
from paceline.observe.chrome import NAMES
from paceline.observe.event_order import EventOrder, MemberKey, TracedProcess, member_name
from paceline.observe.events import DIED, JOINED, LEFT, ROUND, Event, member_of

#: A time on the scheduler's clock, who, and what.
Line: TypeAlias = tuple[float, str, str]

#: Waits that are told, in seconds, and the lines of a story at most.
WAIT_S, MOST = 0.05, 200


def story(order: EventOrder, seconds: float) -> list[str]:
    """Return the lines about the last seconds before the last event, and how each process stood then."""
    processes = order.processes.values()
    end = max((one.events[-1].time for one in processes if one.events), default=0.0)
    told = heapq.merge(*(sorted(_lines(order, one)) for one in processes))
    found = [one for one in told if one[0] >= end - seconds]
    cut = [f"({len(found) - MOST} lines before these are left out)"] if len(found) > MOST else []
    width = max((len(who) for _, who, _ in found), default=0)
    lines = [f"{time - end:9.3f} s  {who:{width}}  {what}" for time, who, what in found[-MOST:]]
    return [*cut, *lines, "", *(f"{member_name(one.key)}: {_stand(order, one, end)}" for one in processes)]


def _lines(order: EventOrder, process: TracedProcess) -> Iterator[Line]:
    who = member_name(process.key)
    for one in process.events:
        if what := _told(one):
            yield one.time, who, what
    for wait, whom in order.waits(process):
        if wait.end - wait.begin >= WAIT_S:
            yield wait.begin, who, f"waits {wait.end - wait.begin:.3f} s for {member_name(whom) if whom else 'answers'}"
    if process.events and not process.is_alive and (process.key in order.dead or not _has_left(process)):
        yield process.events[-1].time, who, "its last event: it has ended without a goodbye"


def _told(event: Event) -> str:
    texts = {
        ROUND: f"begins to push round {event.number}",
        JOINED: "joined: all members are there",
        DIED: f"hears that {member_name(member_of(event.peer))} died",
        LEFT: "leaves with a failure" if event.value else "says goodbye",
    }
    return texts.get(event.kind, "")


def _has_left(process: TracedProcess) -> bool:
    return process.source.role == "scheduler" or any(one.kind == LEFT for one in process.events)


def _stand(order: EventOrder, process: TracedProcess, end: float) -> str:
    """Return the last known state of a process."""
    if not process.events:
        return "no events"
    last = process.events[-1]
    words = [f"round {order.rounds[process.key]}"] if process.key in order.rounds else []
    if process.slices:
        part = process.slices[-1]
        whom = order.waited_for(process.key, part) if process.source.role == "worker" and part.part == WAIT else None
        name = f"{process.parts[part.part]} for {member_name(whom)}" if whom else process.parts[part.part]
        words.append(f"in {name} since {end - part.begin:.3f} s before the end")
    words += _open_requests(order, process.key)
    state = "runs" if process.is_alive else "has ended"
    return ", ".join([*words, f"last event {end - last.time:.3f} s before the end", state])


def _open_requests(order: EventOrder, key: MemberKey) -> Sequence[str]:
    """Return the requests of a process that are not answered, by kind and by who is asked."""
    found: dict[str, int] = {}
    for sent, one in order.pending.get(key, []):
        name = f"{NAMES.get(sent.value, 'request')} at {member_name(one.asked)}"
        found[name] = found.get(name, 0) + 1
    return [f"no answer to {count} {name}" for name, count in found.items()]
