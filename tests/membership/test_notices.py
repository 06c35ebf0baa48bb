"""Workers that are to leave while the others go on."""

from __future__ import annotations

import pytest

from paceline.membership import Membership, Warn
from paceline.wire import messages as m
from tests.membership.test_machine import BLOCK, JOB, Steady, answers, hello, joined, machine, peer_of

THREE = JOB.replace(num_workers=3, num_servers=2)


def training() -> Membership:
    """Return a job whose workers have made a store."""
    members = joined(THREE)
    members.is_supervised = True
    members.handle(b"worker-0", 2, m.Publish("kv", [BLOCK]), 0.5)
    return members


def asked(members: Membership, peer: bytes, why: str, target: str = "") -> m.Reply:
    """Return the answer to a notice, which comes when the scheduler looks around."""
    assert isinstance(members, Steady)
    assert members.handle(peer, 70, m.Notice(why, target), members.last) == []
    ((_, _, answer),) = [one for one in answers(members.tick(members.last + 0.1)) if one[:2] == (peer, 70)]
    return answer


def refusal(answer: m.Reply) -> str:
    assert isinstance(answer, m.Failed)
    assert answer.kind == "PacelineError"
    return answer.text


def phase_of(members: Membership, rank: int) -> str:
    status = members.status(9.0)
    return next(
        state.phase
        for one, state in zip(status.members, status.states, strict=True)
        if (one.role, one.rank) == ("worker", rank)
    )


def test_worker_that_asks_is_told_to_leave_and_counts_as_left_with_its_goodbye() -> None:
    members = training()
    assert members.handle(b"worker-1", 3, m.Notice("SIGTERM"), 1.0) == []
    actions = members.tick(1.1)
    assert Warn("worker 1 on h (pid 9) is to leave after its step: SIGTERM") in actions
    told = answers(actions)
    assert (b"worker-1", 3, m.Noticed([1])) in told
    assert (b"worker-1", 0, m.News([], False, leave="SIGTERM")) in told
    ((_, _, news),) = answers(members.handle(b"worker-1", 4, m.Heartbeat(7), 1.2))
    assert isinstance(news, m.News)
    assert news.leave == "SIGTERM", "the answer to a heartbeat says it too: the news may have got lost"
    assert phase_of(members, 1) == "leaving"
    members.handle(b"worker-0", 5, m.Enter("b"), 1.3)
    members.handle(b"worker-2", 5, m.Enter("b"), 1.3)
    opened = answers(members.handle(b"worker-1", 5, m.Bye("", 7), 1.4))
    assert (b"worker-0", 5, m.Gathered([], [(1, 7)], [1])) in opened, "nobody waits for its exit code"
    assert [one.rank for one in members.notices.left()] == [1]
    assert phase_of(members, 1) == "left"


def test_process_that_is_killed_after_it_has_left_fails_no_job() -> None:
    members = training()
    asked(members, b"worker-1", "SIGTERM")
    members.handle(b"worker-1", 5, m.Bye("", 7), 1.4)
    assert members.ended("worker", 1, 137, 2.0) == [
        Warn("worker 1 on h (pid 9) had left, and its process has ended: its process ended: killed by SIGKILL (exit "
             "code 137)")
    ]  # fmt: skip
    assert members.ended("worker", 1, 0, 2.0) == []
    assert not members.deaths


@pytest.mark.parametrize(("target", "ranks"), [("2", [2]), ("h", [0, 1])])
def test_anybody_with_the_key_may_name_a_worker_or_a_host(target: str, ranks: list[int]) -> None:
    members = machine(THREE)
    for role, rank in [("worker", 0), ("worker", 1), ("worker", 2), ("server", 0), ("server", 1)]:
        host = "other" if (role, rank) == ("worker", 2) else "h"
        members.handle(peer_of(role, rank), 1, hello(role, rank, host=host, num_workers=3, num_servers=2), 0.0)
    members.handle(b"worker-0", 2, m.Publish("kv", [BLOCK]), 0.5)
    answer = asked(members, b"stranger", "the host is needed", target)
    stays = "server 0, server 1 on h: servers cannot leave a job" if target == "h" else ""
    assert answer == m.Noticed(ranks, stays)
    assert [rank for rank in range(3) if phase_of(members, rank) == "leaving"] == ranks
    assert asked(members, b"stranger", "again", target) == answer, "the first reason counts"
    assert members.status(3.0).members


def test_worker_that_nobody_would_go_on_without_does_not_leave() -> None:
    members = training()
    assert asked(members, b"worker-0", "SIGTERM") == m.Noticed([0])
    assert asked(members, b"worker-1", "SIGTERM") == m.Noticed([1])
    assert "nobody would go on without worker 2" in refusal(asked(members, b"worker-2", "SIGTERM"))
    assert phase_of(members, 2) == "live"


def test_notice_is_refused_with_the_reason() -> None:
    members = training()
    assert "there is no worker 3" in refusal(asked(members, b"stranger", "", "3"))
    assert "no process of this job runs on 'h9'; its workers run on h" in refusal(asked(members, b"stranger", "", "h9"))
    assert "name a worker" in refusal(asked(members, b"stranger", ""))
    members.handle(b"worker-1", 5, m.Bye("", 7), 1.4)
    members.ended("worker", 1, 0, 1.5)
    members.tick(1.6)
    assert "has left already" in refusal(asked(members, b"stranger", "", "1"))
    members.notices.is_ending = True
    assert refusal(asked(members, b"worker-0", "SIGTERM")) == "the job ends"


def test_host_with_servers_only_has_nobody_who_can_leave() -> None:
    members = machine(THREE)
    for role, rank in [("worker", 0), ("worker", 1), ("worker", 2), ("server", 0), ("server", 1)]:
        host = "s" if role == "server" else "h"
        members.handle(peer_of(role, rank), 1, hello(role, rank, host=host, num_workers=3, num_servers=2), 0.0)
    members.handle(b"worker-0", 2, m.Publish("kv", [BLOCK]), 0.5)
    assert refusal(asked(members, b"stranger", "", "s")).startswith("no worker runs on s; server 0, server 1 on s")


def test_notice_does_not_apply_before_the_start_and_without_a_store() -> None:
    members = machine(THREE)
    members.handle(b"worker-0", 1, hello("worker", 0, num_workers=3, num_servers=2), 0.0)
    assert "have joined" in refusal(asked(members, b"worker-0", "SIGTERM"))
    assert "does not apply" in refusal(asked(joined(THREE), b"worker-0", "SIGTERM"))


def test_all_workers_hear_the_same_of_who_is_gone_at_a_point_and_where_it_was() -> None:
    members = training()
    asked(members, b"worker-1", "SIGTERM")
    given = m.GiveBack("s", 3, 40)

    def ask(rank: int, point: str) -> m.Reply:
        ((_, _, answer),) = answers(members.handle(b"worker-%d" % rank, 80, m.AskGone(point, "s"), 2.0))
        return answer

    assert ask(0, "s/3/0") == m.Gone([])
    assert answers(members.handle(b"worker-1", 81, given, 2.1)) == [(b"worker-1", 81, m.Done())]
    members.handle(b"worker-1", 82, m.Bye("", 7), 2.2)
    assert ask(2, "s/3/0") == m.Gone([]), "the first one who asks settles it"
    assert ask(2, "s/3/1") == ask(0, "s/3/1") == m.Gone([m.GoneWorker(1, 7, given)])
    for number in range(300):
        ask(0, f"other/{number}")
    assert ask(0, "s/3/0") == m.Gone([m.GoneWorker(1, 7, given)]), "it is forgotten when all are far beyond it"


def test_samplers_of_which_a_worker_tells_have_a_bound() -> None:
    members = training()

    def give(number: int) -> m.Reply:
        ((_, _, answer),) = answers(members.handle(b"worker-1", 80, m.GiveBack(f"s{number}", 3, 40), 2.0))
        return answer

    assert [give(number) for number in range(64)] == [m.Done()] * 64
    assert give(64) == m.Failed("ProtocolError", "worker 1 has more than 64 samplers")
    assert give(0) == m.Done(), "it says how far it has come once more"
