from __future__ import annotations

import math

from paceline.wire import messages as m
from paceline.worker.late import Awaited, LateRequests, missing_in, questions_about

ENTRY = m.Entry(0, 0, 0, 4, 1)


def status(*still_s: float | None) -> m.Status:
    """Return the status of a server and of workers that got on so long ago."""
    members = [m.Member("server", 0, 0, "a", "a", 10, "", b"")]
    members += [m.Member("worker", rank, 0, "b", "b", 20 + rank, "", b"") for rank in range(len(still_s) - 1)]
    states = [m.MemberState(3, 1.0, 0.25, 0, 0, 0, "live", "", still_s=one) for one in still_s]
    return m.Status(members, states, [])


def test_questions_are_about_workers_that_others_wait_for() -> None:
    assert questions_about(m.Push("s", [ENTRY], 1.0, b"", False, True, False)) == [m.AskMissing("s", ENTRY)]
    assert questions_about(m.AskNorm("s", [ENTRY, ENTRY])) == [m.AskMissing("s", ENTRY)] * 2
    assert questions_about(m.Meet("g", 1, [0, 2], "sum", [])) == [m.AskNotMet("g", 1, [0, 2])]
    assert questions_about(m.Enter("end")) == [m.AskAbsent("end")]
    assert questions_about(m.Gather("all", b"")) == [m.AskAbsent("all")]
    assert questions_about(m.Pull("s", [ENTRY], False)) == questions_about(None) == []


def test_missing_workers_are_those_of_all_answers() -> None:
    answers = [m.Missing([2, 0], "pushed"), None, m.Done(), m.Missing([2])]
    assert missing_in(answers) == ([0, 2], ["pushed"])


def test_all_that_are_waited_for_must_get_on() -> None:
    whom = Awaited.of(status(100.0, 1.0, 5.0, 0.5), [("worker", 0), ("worker", 1)])
    assert whom.still_s == 5.0
    assert str(whom) == (
        "worker 0 on b (pid 20), which is at round 3 and sent its last heartbeat 0.2 s ago, "
        "worker 1 on b (pid 21), which is at round 3 and sent its last heartbeat 0.2 s ago"
    )
    assert Awaited.of(status(1.0, None), [("server", 0), ("worker", 0)]).still_s == math.inf
    assert Awaited().still_s == math.inf


def test_a_request_waits_as_long_as_the_processes_that_it_waits_for_get_on() -> None:
    busy, still = (Awaited.of(status(1.0, 1.0, seconds), [("worker", 1)]) for seconds in (2.0, 50.0))
    late, one = LateRequests(10.0, 0), (1, 7)
    assert [late.rest_s(one, busy, 0), late.rest_s(one, busy, 1), late.rest_s(one, still, 1)] == [8.0, 8.0, -40.0]


def test_where_all_have_come_the_answer_gets_the_whole_limit_once_for_each_request() -> None:
    all_here = Awaited.of(status(50.0, 50.0), [("worker", 0)], have_come=True)
    nobody_says = Awaited.of(status(50.0, 50.0), [("worker", 0)])
    late, one, other = LateRequests(10.0, 0), (1, 7), (1, 8)
    assert [late.rest_s(one, all_here, 0), late.rest_s(one, all_here, 0)] == [10.0, -40.0]
    assert [late.rest_s(other, all_here, 0), late.rest_s(other, nobody_says, 0)] == [10.0, -40.0]
    assert late.rest_s(other, all_here, 0) == -40.0


def test_own_message_that_begins_anew_with_each_connection_waits_no_longer() -> None:
    whom = Awaited.of(status(1.0, 1.0), [("worker", 0)])
    late, one, elsewhere = LateRequests(10.0, 0), (1, 7), (2, 7)
    assert [late.rest_s(one, whom, 3), late.rest_s(one, whom, 3)] == [9.0, 9.0]
    assert late.rest_s(elsewhere, whom, 4) == 9.0, "another server's connections"
    assert late.rest_s(one, whom, 4) == 0.0
