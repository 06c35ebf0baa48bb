"""Events of several processes become one order: requests are matched, waits are named, traces and stories follow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.account import APPLY, COMPUTE, MERGE, RECEIVE, SEND, WAIT
from paceline.observe.chrome import ChromeTrace, merged, window
from paceline.observe.event_order import EventOrder, TracedProcess, aligned
from paceline.observe.events import ANSWERED, DIED, GOT, LEFT, PART, ROUND, SENT, TOOK, Event, Source, member
from paceline.observe.story import story
from paceline.observe.trace_file import TraceFile
from paceline.wire import messages as m

PUSH, VALUES = int(m.Push.__struct_config__.tag), int(m.Values.__struct_config__.tag)  # type: ignore[arg-type]
SERVER, FAR = member("server", 0), member("server", 1)


def process(role: str, rank: int, told: Sequence[tuple[Any, ...]], offset: float = 0.0, **more: Any) -> TracedProcess:
    """A process whose clock is behind by ``offset``; events are (time, kind, number, peer, tag)."""
    source = Source(role, rank, f"h{rank}", 100 + rank + 10 * (role == "server"), 1e9, offset, 1e-4)
    events = [
        Event(order, time - offset, 7, number, peer[0] if peer else 0, peer[1] if peer[1:] else 0, kind)
        for order, (time, kind, number, *peer) in enumerate(told, 1)
    ]
    return aligned(source, events, **more)


def worker(rank: int, begin: float, end: float, round: int = 1, **more: Any) -> TracedProcess:
    """A worker that computes until ``begin``, pushes and has the answer at ``end``, in each of some rounds."""
    told: list[tuple[Any, ...]] = []
    for number in range(round):
        told += [
            (number, PART, COMPUTE), (number + begin, PART, SEND), (number + begin + 0.01, ROUND, number + 1),
            (number + begin + 0.02, SENT, number + 1, SERVER, PUSH), (number + begin + 0.03, PART, WAIT),
            (number + end, GOT, number + 1, SERVER, VALUES), (number + end + 0.01, PART, COMPUTE),
        ]  # fmt: skip
    return process("worker", rank, told, **more)


def server(rounds: int = 1, **more: Any) -> TracedProcess:
    """A server that gets the push of worker 0 first and that of worker 1 last, and answers both then."""
    told: list[tuple[Any, ...]] = []
    for number in range(rounds):
        one, two = member("worker", 0), member("worker", 1)
        told += [
            (number + 0.15, PART, MERGE), (number + 0.16, TOOK, number + 1, one, PUSH), (number + 0.17, PART, RECEIVE),
            (number + 0.55, PART, MERGE), (number + 0.56, TOOK, number + 1, two, PUSH), (number + 0.57, PART, APPLY),
            (number + 0.60, ANSWERED, number + 1, one, VALUES), (number + 0.61, ANSWERED, number + 1, two, VALUES),
            (number + 0.62, PART, RECEIVE),
        ]  # fmt: skip
    return process("server", 0, told, **more)


def job(rounds: int = 3) -> EventOrder:
    return EventOrder(
        [worker(1, 0.5, 0.7, rounds, offset=50.0), server(rounds, offset=-9.0), worker(0, 0.1, 0.7, rounds)]
    )


def test_waits_are_named_after_the_one_who_came_last() -> None:
    order = job()
    waits = {key: [whom for _, whom in order.waits(one)] for key, one in order.processes.items()}
    assert waits == {("server", 0): [], ("worker", 0): [("worker", 1)] * 3, ("worker", 1): [("server", 0)] * 3}


@pytest.mark.parametrize("number", [0, 5, 2**64 - 1])
def test_requests_of_servers_that_no_trace_has_are_waited_for_as_their_senders(number: int) -> None:
    told = [(0.1, TOOK, 1, member("worker", 0), PUSH), (0.2, TOOK, number, FAR, PUSH), (0.3, ANSWERED, 1,
             member("worker", 0), VALUES)]  # fmt: skip
    order = EventOrder([process("server", 0, told), process("server", 1, []), worker(0, 0.05, 0.4)])
    [(_, whom)] = order.waits(order.processes["worker", 0])
    assert whom == ("server", 1)


def test_wait_for_a_sum_of_another_server_is_named_after_the_worker_behind_it() -> None:
    """Server 1 sums for its host, and sends the sum to server 0, which answers worker 0 then."""
    late, owner = member("worker", 1), member("server", 0)
    forwarder = process("server", 1, [(0.5, TOOK, 4, late, PUSH), (0.51, SENT, 9, owner, PUSH)])
    told = [(0.2, TOOK, 1, member("worker", 0), PUSH), (0.6, TOOK, 9, FAR, PUSH), (0.61, ANSWERED, 1, 2 << 24, VALUES)]
    order = EventOrder([forwarder, process("server", 0, told), worker(0, 0.1, 0.7)])
    [(_, whom)] = order.waits(order.processes["worker", 0])
    assert whom == ("worker", 1)


def test_wait_without_an_answer_is_for_the_worker_that_is_behind() -> None:
    waiting = process("worker", 0, [(0.0, ROUND, 5), (0.1, SENT, 3, SERVER, PUSH), (0.2, PART, WAIT), (9.0, LEFT, 0)])
    behind = process("worker", 1, [(0.0, ROUND, 4)])
    held = process("server", 0, [(0.15, TOOK, 3, member("worker", 0), PUSH)])
    assert EventOrder([waiting, behind, held]).waits(waiting)[0][1] == ("worker", 1)
    assert EventOrder([waiting, behind]).waits(waiting)[0][1] == ("server", 0)


def checked(events: list[dict[str, Any]]) -> Counter[str]:
    """Check a Chrome trace: slices nest, and flows go from s over t to f, each inside of a slice; counts the phases."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in events:
        if one["ph"] == "X":
            tracks.setdefault((one["pid"], one["tid"]), []).append(one)
            assert one["dur"] >= 0
            assert one["ts"] >= 0
    for ones in tracks.values():
        open_until: list[float] = []
        for one in sorted(ones, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            end = round(one["ts"] + one["dur"], 3)
            assert not open_until or end <= open_until[-1] + 1e-6, one
            open_until.append(end)
    flows: dict[int, list[dict[str, Any]]] = {}
    for one in events:
        if one["ph"] in "stf":
            flows.setdefault(one["id"], []).append(one)
            here = tracks[one["pid"], one["tid"]]
            assert any(it["ts"] <= one["ts"] < it["ts"] + it["dur"] and it["cat"] == "message" for it in here), one
    for ones in flows.values():
        assert [one["ph"] for one in ones] == ["s", "t", "t", "f"]
        assert [one["ts"] for one in ones] == sorted(one["ts"] for one in ones)
    return Counter(one["ph"] for one in events)


def test_trace_has_a_whole_flow_for_each_push() -> None:
    order = job()
    trace = ChromeTrace(order, 0.0, 3.0)
    events = list(trace.events())
    phases = checked(events)
    assert (phases["s"], phases["t"], phases["f"]) == (6, 12, 6)
    assert (len(trace.flows), trace.cut) == (6, 0)
    assert len(set(trace.pids.values())) == 3
    names = Counter(one["name"] for one in events if one["ph"] == "X")
    assert (names["wait for worker 1"], names["wait for server 0"], names["apply"]) == (3, 3, 3)
    assert (names["round 1"], names["push to server 0"], names["answer to worker 0"]) == (2, 6, 3)


def test_pushes_that_the_window_cuts_have_no_flow() -> None:
    trace = ChromeTrace(job(), 0.3, 2.58)
    checked(list(trace.events()))
    assert (len(trace.flows), trace.cut) == (3, 3)


def test_window_has_the_rounds_of_every_worker() -> None:
    assert window(job(5), 1.05, 2) == (1.05, pytest.approx(3.51))
    assert window(job(2), 0.05, 9)[1] == pytest.approx(1.71), "no more than there is"


def test_head_says_the_rank_and_the_clocks() -> None:
    head = ChromeTrace(job(), 0.0, 1.0).head("j", 1)
    assert head["distributedInfo"] == {"rank": 1, "world_size": 2, "backend": "paceline"}
    assert head["paceline"]["clockErrorMicroseconds"] == {"server 0": 100.0, "worker 0": 100.0, "worker 1": 100.0}


def test_profile_of_torch_is_moved_to_its_worker() -> None:
    """Worker 1 has its Unix time at 1e9 + its clock, and its clock is 50 s behind the scheduler's."""
    trace = ChromeTrace(job(), 0.25, 1.0)
    own = {"ph": "X", "name": "aten::mm", "pid": 101, "tid": 5, "ts": 100.0, "dur": 3}
    gpu = {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 200.0, "dur": 3}
    name = {"ph": "M", "name": "process_name", "pid": 101, "ts": 0}
    base = int((1e9 - 49.5) * 1e9)
    found = merged(trace, {"baseTimeNanoseconds": base, "traceEvents": [own, gpu, name]})
    assert [one["ts"] for one in found] == [pytest.approx(250_100.0, abs=0.2), pytest.approx(250_200.0, abs=0.2)]
    assert [one["pid"] for one in found] == [trace.pids["worker", 1], 0]
    with pytest.raises(ValueError, match="none of its processes"):
        merged(trace, {"traceEvents": [gpu]})
    with pytest.raises(ValueError, match="no traceEvents"):
        merged(trace, {})


@pytest.mark.parametrize(
    "events", [[3], [{"pid": []}], [{"pid": 101, "ts": "soon"}], [{"pid": 101, "ts": []}], [{"pid": 101}, None]]
)
def test_damaged_profile_of_torch_is_refused(events: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"events are not those of torch\.profiler|could not convert"):
        merged(ChromeTrace(job(), 0.25, 1.0), {"traceEvents": events})


def test_file_is_whole_json_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path, {"a": 1})
    for number in range(3):
        assert json.loads(path.read_text() or "{}").get("traceEvents", []) == [{"n": one} for one in range(number)]
        file.write([{"n": number}])
    file.close()
    assert json.loads(path.read_text()) == {"a": 1, "traceEvents": [{"n": 0}, {"n": 1}, {"n": 2}]}


def test_story_says_who_died_and_who_waited() -> None:
    dead = worker(1, 0.5, 0.7, 2, is_alive=False)
    waiting = worker(0, 0.1, 0.7, 2)
    hears = process("scheduler", 0, [(2.0, DIED, 0, member("worker", 1))])
    lines = story(EventOrder([waiting, dead, server(2), hears]), 1.5)
    text = "\n".join(lines)
    assert "worker 0   waits 0.580 s for worker 1" in text
    assert "worker 1   its last event: it has ended without a goodbye" in text
    assert "scheduler  hears that worker 1 died" in text
    assert "worker 1: round 2, in compute since" in text
    assert all(float(one.split()[0]) >= -1.5 for one in lines[: lines.index("")])


def test_story_of_many_waits_looks_through_the_requests_a_few_times() -> None:
    class Counted(dict[Any, Any]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    told = [(0.1 * n, *what) for n in range(100) for what in ((PART, WAIT), (SENT, n + 1, SERVER, PUSH), (PART, SEND))]
    order = EventOrder([process("worker", rank, told) for rank in range(3)])
    order.requests = Counted(order.requests)
    assert "no answer to 100 Push at server 0" in "\n".join(story(order, 5.0))
    assert order.requests.looks <= 2
