"""Events as a Chrome trace, which Perfetto, chrome://tracing and HolisticTraceAnalysis open. Pure.

A process for each member, a track for each of its threads. A track has the parts of the account as slices, waits named
after whom they are for, and inside of these a short slice for each request that leaves or comes. A flow leads from each
push or pull over the server to its answer. Times are microseconds of the scheduler's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from paceline.observe.account import WAIT
from paceline.observe.event_order import EventOrder, MemberKey, Slice, TracedProcess, TracedRequest, member_name
from paceline.observe.events import ANSWERED, GOT, ROUND, SENT, TOOK, Event, member_of
from paceline.wire import messages as m

TraceEvent: TypeAlias = dict[str, Any]

#: Longest slice of a message, in seconds, and the bits of process ids: those of other hosts get more.
_MESSAGE_S, _PID_BITS = 20e-6, 22

#: Flows have ids that those of other tools do not have.
_FIRST_FLOW = 1 << 40

#: By number of a message: its name.
NAMES: Mapping[int, str] = {tag: one.__name__ for one, tag in m.TAGS.items()}
_FLOWS = frozenset(m.TAGS[one] for one in (m.Push, m.PushSum, m.Pull, m.PullRows))
_VERBS = {SENT: "{} to {}", GOT: "answer of {1}", TOOK: "{} of {}", ANSWERED: "answer to {1}"}


def window(order: EventOrder, since: float, rounds: int) -> tuple[float, float]:
    """Return begin and end of the trace: so many whole rounds of every worker."""
    ends = [since]
    for process in order.processes.values():
        if process.source.role == "worker" and process.events:
            found = [one.time for one in process.events if one.kind == ROUND and one.time >= since]
            ends.append(found[rounds] if len(found) > rounds else process.events[-1].time)
    return since, max(ends)


class ChromeTrace:
    """The events between two times of the scheduler's clock.

    Attributes:
        pids: process ids in the trace, by member.
        flows: requests with a flow.
        cut: requests of the same kinds that begin or end outside of the times.
    """

    def __init__(self, order: EventOrder, begin: float, end: float) -> None:
        self.order, self.begin, self.end = order, begin, end
        hosts = list(dict.fromkeys(one.source.host for one in order.processes.values()))
        self.pids = {
            key: hosts.index(one.source.host) << _PID_BITS | one.source.pid for key, one in order.processes.items()
        }
        pushes = [one for one in order.requests.values() if _is_flow(one) and any(self._inside(one))]
        self.flows = [one for one in pushes if one.is_whole and all(self._inside(one))]
        self.cut = len(pushes) - len(self.flows)
        self._tids: dict[tuple[MemberKey, int], int] = {}

    def events(self) -> Iterator[TraceEvent]:
        """Yield all events."""
        for key, process in self.order.processes.items():
            yield from self._head(key, process)
            yield from self._rounds(process)
            waits = dict(self.order.waits(process))
            for one in process.slices:
                if one.end > self.begin and one.begin < self.end:
                    yield self._slice(process, one, waits.get(one))
            yield from self._messages(process)
            yield from self._threads(key)
        for number, request in enumerate(self.flows, _FIRST_FLOW):
            yield from self._flow(number, request)

    def head(self, job: str, rank: int = 0) -> dict[str, Any]:
        """Return what stands before the events of a file."""
        processes = self.order.processes
        workers = sum(one.source.role == "worker" for one in processes.values())
        base = next((one.source.unix - one.source.offset for one in processes.values()), 0.0) + self.begin
        about = {
            "job": job,
            "clockErrorMicroseconds": {member_name(key): _error_us(one) for key, one in processes.items()},
            "lostEvents": {member_name(key): one.lost for key, one in processes.items() if one.lost},
            "flows": len(self.flows),
            "flowsCutAtTheEdges": self.cut,
        }
        return {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": int(base * 1e9),
            "distributedInfo": {"rank": rank, "world_size": workers, "backend": "paceline"},
            "paceline": about,
        }

    # ---- one process -------------------------------------------------------------------------------------------------

    def _head(self, key: MemberKey, process: TracedProcess) -> Iterator[TraceEvent]:
        order = list(self.order.processes).index(key)
        error = f"clock to {_error_us(process):g} us"
        names = {
            "process_name": {"name": f"{member_name(key)} on {process.source.host}"},
            "process_labels": {"labels": error},
        }
        for name, args in {**names, "process_sort_index": {"sort_index": order}}.items():
            yield {"ph": "M", "name": name, "pid": self.pids[key], "args": args}

    def _threads(self, key: MemberKey) -> Iterator[TraceEvent]:
        names = {0: "rounds", 1: "main"}
        for number in sorted({tid for (one, _), tid in self._tids.items() if one == key} | {0}):
            args = {"name": names.get(number, f"thread {number}")}
            yield {"ph": "M", "name": "thread_name", "pid": self.pids[key], "tid": number, "args": args}

    def _tid(self, key: MemberKey, thread: int) -> int:
        """Return the number of a thread: 1 for the one that the account is of, or for the first one."""
        known = [one for one in self._tids if one[0] == key]
        return self._tids.setdefault((key, thread), len(known) + 1)

    def _rounds(self, process: TracedProcess) -> Iterator[TraceEvent]:
        marks = [one for one in process.events if one.kind == ROUND]
        for one, following in pairwise(marks):
            if one.time >= self.begin and following.time <= self.end:
                yield self._event(process.key, 0, f"round {one.number}", "round", one.time, following.time)

    def _slice(self, process: TracedProcess, one: Slice, waited_for: MemberKey | None) -> TraceEvent:
        name = process.parts[one.part]
        if waited_for is not None and one.part == WAIT:
            name = f"wait for {member_name(waited_for)}"
        tid = self._tid(process.key, one.thread)
        return self._event(process.key, tid, name, "part", max(one.begin, self.begin), min(one.end, self.end))

    def _messages(self, process: TracedProcess) -> Iterator[TraceEvent]:
        """Yield a slice for each message, which ends before anything else happens on its thread."""
        following: dict[int, float] = {}
        found = []
        for one in reversed(process.events):
            if one.kind in _VERBS and self.begin <= one.time < self.end:
                end = min(one.time + _MESSAGE_S, following.get(one.thread, self.end), self.end)
                found.append(self._message(process, one, end))
            following[one.thread] = one.time
        yield from reversed(found)

    def _message(self, process: TracedProcess, one: Event, end: float) -> TraceEvent:
        name = _VERBS[one.kind].format(NAMES.get(one.value, "request").lower(), member_name(member_of(one.peer)))
        args = {"number": one.number}
        tid = self._tid(process.key, one.thread)
        return self._event(process.key, tid, name, "message", one.time, end) | {"args": args}

    def _event(self, key: MemberKey, tid: int, name: str, kind: str, begin: float, end: float) -> TraceEvent:
        start, stop = self._micros(begin), self._micros(end)
        dur = round(stop - start, 3)
        return {"ph": "X", "name": name, "cat": kind, "pid": self.pids[key], "tid": tid, "ts": start, "dur": dur}

    # ---- flows -------------------------------------------------------------------------------------------------------

    def _flow(self, number: int, request: TracedRequest) -> Iterator[TraceEvent]:
        stations = [("s", request.asker, request.sent), ("t", request.asked, request.took)]
        stations += [("t", request.asked, request.answered), ("f", request.asker, request.got)]
        for phase, key, event in stations:
            assert event is not None
            place = {"pid": self.pids[key], "tid": self._tid(key, event.thread), "ts": self._micros(event.time)}
            more = {"bp": "e"} if phase == "f" else {}
            yield {"ph": phase, "id": number, "name": "push", "cat": "push", **place, **more}

    def _inside(self, request: TracedRequest) -> list[bool]:
        """Return for each known event of a request whether it is between the two times."""
        return [self.begin <= one.time < self.end for one in request[2:] if isinstance(one, Event)]

    def _micros(self, time: float) -> float:
        return round(1e6 * (time - self.begin), 3)


def merged(trace: ChromeTrace, profile: Mapping[str, Any]) -> list[TraceEvent]:
    """Return the events of a file of ``torch.profiler`` as those of the worker that wrote it.

    Raises:
        ValueError: no process of the trace has written it, or it is no such file.
    """
    events = profile.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("it has no traceEvents")
    try:
        return _moved(trace, events, profile.get("baseTimeNanoseconds", 0))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"its events are not those of torch.profiler: {error}") from error


def _moved(trace: ChromeTrace, events: Sequence[Mapping[str, Any]], base_ns: float) -> list[TraceEvent]:
    pids = {one.get("pid") for one in events}
    wrote = [one for one in trace.order.processes.values() if one.source.pid in pids and one.source.role == "worker"]
    if not wrote:
        raise ValueError("none of its processes is a worker of this job")
    source = wrote[0].source
    shift = 1e-9 * base_ns - source.unix + source.offset - trace.begin
    found = []
    for one in events:
        is_own = one.get("pid") == source.pid
        if is_own and one.get("ph") == "M" and str(one.get("name")).startswith("process_"):
            continue
        moved = {"ts": round(float(one["ts"]) + 1e6 * shift, 3)} if "ts" in one and one.get("ph") != "M" else {}
        found.append({**one, **moved, **({"pid": trace.pids[wrote[0].key]} if is_own else {})})
    return found


def _is_flow(request: TracedRequest) -> bool:
    first = request.sent or request.took
    return first is not None and first.value in _FLOWS


def _error_us(process: TracedProcess) -> float:
    return round(1e6 * process.source.error, 1) if math.isfinite(process.source.error) else -1.0
