"""A trace begins for all members, counts whole rounds of every worker, and ends, whatever they do."""

from __future__ import annotations

from paceline.membership.traces import GONE_S, MAX_BYTES, MAX_PARTS, Traces
from paceline.wire import messages as m
from paceline.wire.limits import MAX_TRACE_BYTES

ASK = m.AskTrace(7, 2, 10.0, 0)


def member(role: str, rank: int) -> m.Member:
    return m.Member(role, rank, 0, "h", "h", 1, "", b"")


def events(trace: int = 7, records: bytes = b"x", until: float = 1.0, error: float = 0.0) -> m.TraceEvents:
    return m.TraceEvents(trace, 0.0, until, 0.0, 0.0, error, 0, records)


MEMBERS = [member("server", 0), member("worker", 0), member("worker", 1)]
LIVE = {(one.role, one.rank) for one in MEMBERS}


def live(rounds: tuple[int, int]) -> dict[tuple[str, int], int]:
    return {("server", 0): 0, ("worker", 0): rounds[0], ("worker", 1): rounds[1]}


def beat(traces: Traces, rounds: tuple[int, int], trace: int = 7) -> None:
    for one in MEMBERS:
        traces.note(one, events(trace), live(rounds), 1.0)


def asked(traces: Traces, part: int = 0, now: float = 1.0) -> m.TraceIs:
    found = traces.ask(m.AskTrace(7, 2, 10.0, part), now)
    assert isinstance(found, m.TraceIs)
    return found


def test_trace_ends_when_every_worker_has_made_the_rounds_and_all_have_sent_once_more() -> None:
    traces = Traces()
    assert traces.number == 0
    assert asked(traces) == m.TraceIs([], False, "")
    beat(traces, (7, 17))
    beat(traces, (10, 20))  # taken since all have begun: the rounds count from here
    beat(traces, (99, 22))
    assert traces.number == 7
    beat(traces, (99, 23))  # three more than 20: two are whole
    beat(traces, (99, 23))
    assert traces.number == 0
    found, more = asked(traces), asked(traces, 10)
    assert (len(found.parts), len(more.parts), found.is_over, more.is_over) == (10, 3, False, False)
    assert {(one.role, one.rank) for one in found.parts} == LIVE
    assert asked(traces, 13) == m.TraceIs([], True, "")


def test_events_that_were_under_way_when_it_began_to_end_are_not_the_last_ones() -> None:
    traces = Traces()
    asked(traces)
    beat(traces, (1, 1))
    beat(traces, (1, 1))
    traces.note(MEMBERS[1], events(), live((4, 4)), 2.0)
    for one in MEMBERS:
        traces.note(one, events(until=1.9), live((4, 4)), 2.1)
        traces.note(one, events(until=2.1, error=0.2), live((4, 4)), 2.2)
    assert traces.number == 7
    for one in MEMBERS:
        traces.note(one, events(until=2.2, error=0.2), live((4, 4)), 2.3)
    assert traces.number == 0


def test_rounds_count_from_events_that_were_taken_since_all_members_have_begun() -> None:
    traces = Traces()
    asked(traces)
    for one in MEMBERS:
        traces.note(one, events(until=1.0), live((1, 1)), 5.0)
    for one in MEMBERS:
        traces.note(one, events(until=4.9), live((2, 2)), 5.1)
        traces.note(one, events(until=5.1), live((8, 8)), 5.2)
        traces.note(one, events(until=5.2), live((10, 10)), 5.3)
    for one in MEMBERS:
        traces.note(one, events(until=5.4), live((11, 11)), 5.4)
    assert traces.number == 7, "three more than 8 have just been made"
    for one in MEMBERS:
        traces.note(one, events(until=5.5), live((11, 11)), 5.5)
    assert traces.number == 0


def test_nothing_begins_before_all_members_send() -> None:
    traces = Traces()
    asked(traces)
    for _ in range(9):
        traces.note(MEMBERS[1], events(), live((5, 5)), 1.0)
        traces.note(MEMBERS[1], events(), {}, 1.0)
    traces.tick(10.5)
    assert traces.number == 7
    traces.tick(11.5)
    assert traces.number == 0
    assert "some members did not make 2 rounds in time" in asked(traces).says


def test_deadline_names_the_workers_that_made_too_few_rounds() -> None:
    traces = Traces()
    asked(traces)
    beat(traces, (1, 1))
    beat(traces, (1, 1))
    beat(traces, (9, 1))
    traces.tick(12.0)
    assert asked(traces).says == "worker 1 did not make 2 rounds in time; raise --timeout"


def test_member_that_leaves_is_not_waited_for() -> None:
    traces = Traces()
    asked(traces)
    beat(traces, (1, 1))
    beat(traces, (1, 1))
    traces.note(MEMBERS[1], events(), {("server", 0): 0, ("worker", 0): 9}, 1.0)
    traces.note(MEMBERS[0], events(), {("server", 0): 0, ("worker", 0): 9}, 1.0)
    traces.note(MEMBERS[1], events(), {("server", 0): 0, ("worker", 0): 9}, 1.0)
    assert traces.number == 0


def test_second_trace_is_refused_while_one_is_made_and_changes_nothing() -> None:
    traces = Traces()
    asked(traces)
    beat(traces, (1, 1))
    refused = traces.ask(m.AskTrace(8, 1, 99.0, 0), 4.0)
    assert refused == m.Failed("ProtocolError", "another trace of this job runs, for 7 s at most; wait for its end")
    assert traces.number == 7
    beat(traces, (2, 2), trace=6)
    assert len(asked(traces).parts) == 3, "events of another trace are left out"
    traces.tick(12.0)
    assert isinstance(traces.ask(m.AskTrace(8, 1, 99.0, 0), 12.0), m.TraceIs)
    assert traces.number == 8


def test_events_are_bounded_and_come_in_bounded_answers() -> None:
    traces = Traces()
    asked(traces)
    big = events(records=bytes(MAX_TRACE_BYTES))
    count = MAX_BYTES // MAX_TRACE_BYTES + 1
    for _ in range(count + 5):
        traces.note(MEMBERS[0], big, live((0, 0)), 1.0)
    assert traces.number == 0
    parts = 0
    while not (found := asked(traces, parts)).is_over:
        assert sum(len(one.events.records) for one in found.parts) <= 1 << 20
        parts += len(found.parts)
    assert parts == count
    assert found.says == "it has 64 MiB of events, and ends early"


def test_heartbeats_without_events_take_no_memory() -> None:
    traces = Traces()
    asked(traces)
    for _ in range(50):
        traces.note(MEMBERS[1], events(records=b""), live((0, 0)), 1.0)
    assert len(asked(traces).parts) == 1, "the first one has the member's clock"


def test_heartbeats_with_few_events_are_bounded_too() -> None:
    traces = Traces()
    asked(traces)
    for _ in range(MAX_PARTS + 5):
        traces.note(MEMBERS[1], events(), live((0, 0)), 1.0)
    assert traces.number == 0
    assert asked(traces, MAX_PARTS - 1).says == f"it has the events of {MAX_PARTS} heartbeats, and ends early"
    assert len(asked(traces, MAX_PARTS - 1).parts) == 1


def test_trace_whose_asker_has_gone_ends_and_makes_room() -> None:
    traces = Traces()
    traces.ask(m.AskTrace(7, 2, 3600.0, 0), 1.0)
    beat(traces, (1, 1))
    traces.tick(1.0 + GONE_S)
    assert traces.number == 7
    traces.tick(1.1 + GONE_S)
    assert traces.number == 0
    assert isinstance(traces.ask(m.AskTrace(8, 1, 60.0, 0), 1.1 + GONE_S), m.TraceIs)
    assert traces.number == 8


def test_asker_that_asks_on_keeps_its_trace_to_the_deadline() -> None:
    traces = Traces()
    for second in range(60):
        traces.ask(m.AskTrace(7, 2, 60.0, 0), float(second))
        traces.tick(float(second))
    assert traces.number == 7


def test_events_that_are_being_fetched_are_not_lost_to_the_next_trace() -> None:
    traces = Traces()
    asked(traces)
    beat(traces, (1, 1))
    beat(traces, (1, 1))
    beat(traces, (9, 9))
    beat(traces, (9, 9))
    assert traces.number == 0
    refused = traces.ask(m.AskTrace(8, 1, 60.0, 0), 2.0)
    assert isinstance(refused, m.Failed)
    assert "wait for its end" in refused.text
    assert asked(traces, now=3.0).parts
    assert asked(traces, 12, now=3.0).is_over
    assert isinstance(traces.ask(m.AskTrace(8, 1, 60.0, 0), 3.0), m.TraceIs)


def test_events_that_nobody_fetches_are_forgotten() -> None:
    traces = Traces()
    asked(traces)
    beat(traces, (1, 1))
    traces.tick(12.0)
    assert asked(traces, now=12.0).parts
    traces.tick(75.0)
    assert asked(traces, now=75.0) == m.TraceIs([], True, asked(traces, now=75.0).says)
