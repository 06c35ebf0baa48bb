"""Workers that die while the others go on."""

from __future__ import annotations

import pytest

from paceline.host.exitcodes import PEER_FAILED, WORKER_LOST
from paceline.membership import Finish, Membership
from paceline.membership.effects import Action
from paceline.wire import messages as m
from tests.membership.test_machine import JOB, answers, joined

THREE = JOB.replace(num_workers=3, num_servers=2, on_worker_death="continue")
REASON = "its process ended: killed by SIGKILL (exit code 137)"
DEATH = m.Death("worker", 1, "h", REASON)


def dead(members: Membership) -> list[Action]:
    return members.ended("worker", 1, 137, 1.0)


def confirm(members: Membership, server: int, round: int) -> list[tuple[bytes, int, m.Reply]]:
    beat = m.Heartbeat(0, taken_out=[(1, round)])
    return [one for one in answers(members.handle(b"server-%d" % server, 9, beat, 1.5)) if one[1] != 9]


def test_others_go_on_when_every_server_has_taken_the_worker_out() -> None:
    members = joined(THREE)
    members.handle(b"worker-0", 2, m.Gather("g", b"zero"), 0.5)
    members.handle(b"worker-2", 2, m.Gather("g", b"two"), 0.5)
    news = m.News([], False, [1], [], [DEATH])
    assert answers(dead(members)) == [(peer, 0, news) for peer in (b"worker-0", b"worker-2", b"server-0", b"server-1")]
    assert confirm(members, 0, 6) == []
    both = m.Gathered([b"zero", b"", b"two"], [(1, 7)], [1])
    assert confirm(members, 1, 7) == [(b"worker-0", 2, both), (b"worker-2", 2, both)]
    assert confirm(members, 1, 7) == []
    assert not members.deaths
    members.check()


def test_samples_of_the_last_round_are_done_and_later_ones_are_given_to_others() -> None:
    members = joined(THREE)

    def take(worker: int, number: int, done: int, round: int) -> m.Reply:
        body = m.TakeSamples("p", 8, number, 0, 2, done, round)
        return answers(members.handle(b"worker-%d" % worker, 3 + number, body, 0.5))[0][2]

    assert take(1, 1, 0, 0) == m.PoolSamples([(0, 2)], False, False, 0)
    assert take(1, 2, 1, 1) == m.PoolSamples([(2, 4)], False, False, 0)
    assert take(0, 1, 0, 0) == m.PoolSamples([(4, 6)], False, False, 0)
    dead(members)
    confirm(members, 0, 1)
    assert confirm(members, 1, 1) == []
    assert take(0, 2, 1, 1) == m.PoolSamples([(2, 4)], False, False, 0)
    assert take(2, 1, 0, 0) == m.PoolSamples([(6, 8)], False, False, 0)


def test_worker_that_comes_back_hears_that_it_is_dead() -> None:
    members = joined(THREE)
    dead(members)
    assert answers(members.handle(b"worker-1", 5, m.Heartbeat(3), 2.0)) == [(b"worker-1", 5, m.News([DEATH], False))]
    ((_, _, failed),) = answers(members.handle(b"worker-1", 6, m.Enter("b"), 2.0))
    assert failed == m.Failed("PeerDiedError", f"worker 1 on h died: {REASON}; the others went on without it")


def test_job_that_lost_a_worker_ends_with_a_code_of_its_own() -> None:
    members = joined(THREE)
    dead(members)
    for server in range(2):
        confirm(members, server, 0)
    for rank in (0, 2):
        members.handle(b"worker-%d" % rank, 9, m.Bye("", 4), 2.0)
    for rank in range(2):
        members.handle(b"server-%d" % rank, 9, m.Bye(""), 2.0)
    assert members.tick(2.1) == [Finish(WORKER_LOST)]


def test_death_of_a_server_or_of_the_last_worker_ends_the_job() -> None:
    members = joined(THREE)
    dead(members)
    members.ended("worker", 0, 1, 1.0)
    assert not members.deaths
    members.ended("worker", 2, 1, 1.0)
    assert [one.rank for one in members.deaths] == [2]
    members = joined(THREE)
    members.ended("server", 0, 1, 1.0)
    assert [one.role for one in members.deaths] == ["server"]


@pytest.mark.parametrize(
    ("choice", "stores", "goes_on"),
    [("", [True], True), ("", [True, False], False), ("", [], False), ("stop", [True], False), ("continue", [], True)],
)
def test_stores_decide_unless_the_user_does(choice: str, stores: list[bool], goes_on: bool) -> None:
    members = joined(THREE.replace(on_worker_death=choice))
    for number, one in enumerate(stores):
        members.handle(b"worker-0", 2 + number, m.Publish("s", [], one), 0.5)
    dead(members)
    assert bool(members.losses.deaths) == goes_on
    assert bool(members.deaths) != goes_on


def test_death_of_worker_0_ends_the_job_while_others_wait_for_its_keys() -> None:
    members = joined(THREE)
    members.handle(b"worker-1", 2, m.Lookup("s", ["w"]), 0.5)
    members.ended("worker", 0, 137, 1.0)
    assert [one.rank for one in members.deaths] == [0]
    assert Finish(PEER_FAILED) in members.tick(60.0)
