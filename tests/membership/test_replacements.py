"""Processes that take over from workers that have died, while the others go on."""

from __future__ import annotations

import pytest

from paceline.host.exitcodes import WORKER_LOST
from paceline.membership import Finish, Membership
from paceline.membership.effects import Action
from paceline.wire import messages as m
from tests.membership.test_losses import REASON, THREE, confirm, dead
from tests.membership.test_machine import answers, hello, joined

ROUND, AGAIN = 7, b"again"


def job(*, lock_step: bool = True) -> Membership:
    """Return a job whose servers have all taken worker 1 out, which has died."""
    members = joined(THREE)
    members.handle(b"worker-0", 2, m.Publish("s", [], not lock_step), 0.5)
    dead(members)
    for server in range(2):
        confirm(members, server, ROUND)
    return members


def comes(members: Membership, peer: bytes = AGAIN, incarnation: int = 1, seq: int = 1) -> list[Action]:
    return members.handle(peer, seq, hello("worker", 1, num_workers=3, num_servers=2, incarnation=incarnation), 2.0)


def known(members: Membership, *, counts: bool, incarnation: int = 1) -> list[tuple[bytes, int, m.Reply]]:
    """Let all servers say that they know the process; returns what the last one's word has brought about."""
    beat = m.Heartbeat(0, taken_in=[m.TakenIn(1, incarnation, counts)])
    assert not [one for one in answers(members.handle(b"server-0", 9, beat, 2.5)) if one[1] != 9]
    return [one for one in answers(members.handle(b"server-1", 9, beat, 2.5)) if one[1] != 9]


def set_up(members: Membership) -> Membership:
    """Return the job when the process sets up what its script needs."""
    assert comes(members) == []
    told = {peer: news for peer, _, news in answers(members.tick(2.1)) if isinstance(news, m.News)}
    assert [one.incarnation for one in told[b"server-0"].came] == [1]
    assert not told[b"worker-0"].came
    ((peer, seq, welcome),) = known(members, counts=False)
    assert (peer, seq) == (AGAIN, 1)
    assert isinstance(welcome, m.Welcome)
    assert known(members, counts=False) == []
    return members


def is_ready(members: Membership) -> Membership:
    """Return the job when its script has come to its loop."""
    told = answers(set_up(members).handle(AGAIN, 3, m.Join(), 3.0))
    assert [news.joiners for peer, _, news in told if isinstance(news, m.News) and peer == b"worker-2"] == [[1]]
    return members


def gather(members: Membership, rank: int, name: str = "g", why_shut: str = "") -> list[tuple[bytes, int, m.Reply]]:
    body = m.Gather(name, b"%d" % rank, ROUND + 2, lets_in=True, why_shut=why_shut)
    return answers(members.handle(b"worker-%d" % rank, 4, body, 3.5))


def test_in_lock_step_it_counts_between_the_same_two_rounds_of_all() -> None:
    members = is_ready(job())
    assert gather(members, 0) == []
    told = {peer: news for peer, _, news in gather(members, 2) if isinstance(news, m.News)}
    phase = members.log.generation
    assert told[b"server-1"].rejoined == [m.Rejoined(1, phase, ROUND + 2)]
    assert answers(members.handle(b"worker-0", 8, m.Enter("b"), 3.5)) == []
    opened = known(members, counts=True)
    both = m.Gathered([b"0", b"", b"2"], [(1, ROUND)], came=[1], phase=phase)
    assert opened == [(AGAIN, 3, m.Joined(phase, ROUND + 2, 0)), (b"worker-0", 4, both), (b"worker-2", 4, both)]
    assert [one.kind for one in members.log.shown(4.0)] == ["starts", "died", "joins"]
    assert known(members, counts=True) == []
    for peer, rank in ((AGAIN, 1), (b"worker-0", 0), (b"worker-2", 2)):
        last = answers(members.handle(peer, 5, m.Gather("h", b"%d" % rank, ROUND + 2), 4.0))
    assert last[-1][2] == m.Gathered([b"0", b"1", b"2"])
    members.check()


def test_elsewhere_it_counts_at_once_and_takes_samples_of_the_pool() -> None:
    members = job(lock_step=False)
    members.handle(b"worker-0", 3, m.TakeSamples("p", 8, 1, 0, 2, 0, 0), 1.0)
    set_up(members).handle(AGAIN, 3, m.Join(), 3.0)
    phase = members.log.generation
    assert known(members, counts=True) == [(AGAIN, 3, m.Joined(phase, ROUND, -1))]
    took = answers(members.handle(AGAIN, 4, m.TakeSamples("p", 8, 1, 0, 2, 0, 0), 4.0))
    assert took == [(AGAIN, 4, m.PoolSamples([(2, 4)], False, False, phase))]


def test_it_waits_until_the_death_of_the_one_before_is_known_to_all() -> None:
    members = joined(THREE)
    assert comes(members) == []
    assert answers(members.tick(2.1)) == []
    dead(members)
    confirm(members, 0, ROUND)
    assert answers(members.tick(2.2)) == []
    told = confirm(members, 1, ROUND)
    assert not [one for one in told if one[0] == AGAIN]
    assert [peer for peer, _, news in answers(members.tick(2.3)) if isinstance(news, m.News) and news.came]


def test_older_process_is_refused_by_name() -> None:
    members = set_up(job())
    ((_, _, news),) = answers(members.handle(b"worker-1", 5, m.Heartbeat(3), 3.0))
    assert isinstance(news, m.News)
    assert "incarnation 0 (pid 9) was replaced by incarnation 1 on h" in news.deaths[0].reason
    ((_, _, failed),) = answers(members.handle(b"worker-1", 6, m.Enter("b"), 3.0))
    assert isinstance(failed, m.Failed)
    assert "was replaced by incarnation 1" in failed.text
    ((_, _, refused),) = answers(comes(members, b"third", incarnation=1))
    assert isinstance(refused, m.Failed)
    assert "rank is taken" in refused.text
    assert answers(comes(members, seq=2)) == [], "it asks again while it is not welcome yet"


def test_it_hears_why_it_cannot_join() -> None:
    members = is_ready(job())
    gather(members, 0, why_shut="batches are fetched ahead")
    told = gather(members, 2)
    assert told[0] == (AGAIN, 3, m.Failed("PacelineError", "it cannot join: batches are fetched ahead"))
    assert [peer for peer, _, body in told if isinstance(body, m.Gathered)] == [b"worker-0", b"worker-2"]
    assert gather(members, 0, "g2") == []
    assert len(gather(members, 2, "g2")) == 2, "nobody is ready any more"


@pytest.mark.parametrize("when", ["sets up", "is let in"])
def test_others_go_on_when_it_dies_before_it_counts(when: str) -> None:
    members = set_up(job()) if when == "sets up" else is_ready(job())
    gather(members, 0)
    if when == "is let in":
        gather(members, 2)
    members.ended("worker", 1, 1, 3.6)
    assert members.losses.history == [m.Death("worker", 1, "h", REASON)], "the launcher has seen its end"
    opened = [*confirm(members, 0, 2), *confirm(members, 1, 2)]
    if when == "is let in":
        both = m.Gathered([b"0", b"", b"2"], [(1, ROUND)], [1])
        assert opened == [(b"worker-0", 4, both), (b"worker-2", 4, both)]
    comes(members, b"third", incarnation=2)
    assert [peer for peer, _, news in answers(members.tick(4.0)) if isinstance(news, m.News) and news.came]
    assert known(members, counts=False, incarnation=1) == [], "a word on the one before"
    assert [one[0] for one in known(members, counts=False, incarnation=2)] == [b"third"]


def test_its_death_after_that_is_another_one() -> None:
    members = is_ready(job())
    gather(members, 0)
    gather(members, 2)
    known(members, counts=True)
    members.ended("worker", 1, 137, 4.0)
    kinds = [one if isinstance(one, int) else one.incarnation for one in members.losses.history]
    assert kinds == [0, 1, 1]


def test_who_comes_too_late_hears_that_the_job_is_over() -> None:
    members = is_ready(job())
    over = m.Failed("JobOverError", "the job has ended before this process could join")
    for rank in (0, 2):
        told = answers(members.handle(b"worker-%d" % rank, 9, m.Bye("", 9), 4.0))
    told += answers(members.tick(10.0))
    assert (AGAIN, 3, over) in told
    assert answers(members.handle(AGAIN, 5, m.Join(), 10.0)) == [(AGAIN, 5, over)]
    members.ended("worker", 1, 1, 10.5)
    for rank in range(2):
        members.handle(b"server-%d" % rank, 9, m.Bye(""), 11.0)
    assert members.tick(11.5) == [Finish(WORKER_LOST)]


def test_who_waits_for_the_one_before_when_the_job_ends_hears_it_too() -> None:
    members = joined(THREE)
    comes(members)
    dead(members)
    told: list[Action] = []
    for rank in (0, 2):
        told += members.handle(b"worker-%d" % rank, 9, m.Bye("", 9), 4.0)
    told += members.tick(10.0)
    assert [(one[0], one[2].kind) for one in answers(told) if isinstance(one[2], m.Failed)] == [(AGAIN, "JobOverError")]


def test_job_ends_when_only_a_fresh_process_would_be_left_whose_weights_are_its_own() -> None:
    members = is_ready(job())
    members.ended("worker", 0, 137, 4.0)
    assert not members.deaths
    members.ended("worker", 2, 137, 4.0)
    assert [one.rank for one in members.deaths] == [2], "the last one that has the job's weights"
    ((_, _, failed),) = answers(members.handle(AGAIN, 5, m.Join(), 4.1))
    assert isinstance(failed, m.Failed)
    assert failed.kind == "PeerDiedError"
