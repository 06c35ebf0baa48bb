"""Pools of samples at the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.membership.effects import Answer, Waiting
from paceline.membership.log import MembershipLog
from paceline.membership.pools import MAX_POOLS, Pools
from paceline.wire import messages as m
from tests.membership.test_machine import JOB, answers, joined


def take(number: int, epoch: int = 0, count: int = 2, done: int = 0, length: int = 4, pool: str = "p") -> m.TakeSamples:
    return m.TakeSamples(pool, length, number, epoch, count, done)


def test_worker_is_told_to_wait_and_answered_when_another_leaves() -> None:
    pools = Pools(2, MembershipLog())
    assert pools.take(0, Waiting(b"0", 1), take(1)) == [Answer(b"0", 1, m.PoolSamples([(0, 2)], False, False, 0))]
    assert pools.take(1, Waiting(b"1", 1), take(1)) == [Answer(b"1", 1, m.PoolSamples([(2, 4)], False, False, 0))]
    assert pools.take(1, Waiting(b"1", 2), take(2, done=1)) == [Answer(b"1", 2, m.PoolSamples([], False, True, 0))]
    assert pools.wait(1, Waiting(b"1", 3), m.AwaitSamples("p")) == []
    given = m.PoolSamples([(0, 2)], False, False, 0)
    assert pools.leave(0, 0) == [Answer(b"1", 3, given)]
    assert pools.wait(1, Waiting(b"1", 4), m.AwaitSamples("p")) == [Answer(b"1", 4, given)], "a repeat counts once"


def test_answer_that_comes_before_the_worker_waits_is_kept() -> None:
    pools = Pools(2, MembershipLog())
    pools.take(0, Waiting(b"0", 1), take(1, count=4))
    pools.take(1, Waiting(b"1", 1), take(1))
    over = m.PoolSamples([], True, False, 0)
    assert pools.take(0, Waiting(b"0", 2), take(2, done=1)) == [Answer(b"0", 2, over)]
    assert pools.wait(1, Waiting(b"1", 2), m.AwaitSamples("p")) == [Answer(b"1", 2, over)]


def test_who_waits_when_the_job_fails_is_returned() -> None:
    pools = Pools(2, MembershipLog())
    pools.take(0, Waiting(b"0", 1), take(1, count=4))
    pools.take(1, Waiting(b"1", 1), take(1))
    pools.wait(1, Waiting(b"1", 2), m.AwaitSamples("p"))
    assert pools.clear() == [Waiting(b"1", 2)]
    assert pools.clear() == []


def test_worker_that_left_before_the_pool_was_made_gets_nothing() -> None:
    pools = Pools(2, MembershipLog())
    pools.leave(0, 0)
    [answer] = pools.take(0, Waiting(b"0", 1), take(1))
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, m.Failed)
    assert "has left" in answer.body.text


def refusal(actions: Sequence[object]) -> str:
    [answer] = actions
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, m.Failed)
    return answer.body.text


def test_senseless_requests_are_refused() -> None:
    pools = Pools(1, MembershipLog())
    assert "no pool 'p'" in refusal(pools.wait(0, Waiting(b"0", 1), m.AwaitSamples("p")))
    pools.take(0, Waiting(b"0", 2), take(1))
    assert "has 4 samples, worker 0 has 5" in refusal([*pools.take(0, Waiting(b"0", 3), take(2, length=5))])
    assert "follows its request 1" in refusal([*pools.take(0, Waiting(b"0", 3), take(3))])
    for number in range(MAX_POOLS - 1):
        pools.take(0, Waiting(b"0", 4), take(1, pool=str(number)))
    assert "at most 64 pools" in refusal([*pools.take(0, Waiting(b"0", 5), take(1, pool="more"))])


def test_samples_that_are_given_back_go_to_who_waits() -> None:
    members = joined(JOB)

    def take(worker: int) -> list[tuple[bytes, int, m.Reply]]:
        body = m.TakeSamples("p", 4, 1, 0, 4, 0, 0)
        return answers(members.handle(b"worker-%d" % worker, 3, body, 0.5))

    assert take(0) == [(b"worker-0", 3, m.PoolSamples([(0, 4)], False, False, 0))]
    assert take(1) == [(b"worker-1", 3, m.PoolSamples([], False, True, 0))]
    assert answers(members.handle(b"worker-1", 4, m.AwaitSamples("p"), 0.6)) == []
    found = answers(members.handle(b"worker-0", 4, m.ReturnSamples("p", 1, [(2, 4)]), 0.7))
    assert found == [(b"worker-0", 4, m.Done()), (b"worker-1", 4, m.PoolSamples([(2, 4)], False, False, 0))]


def test_samples_of_no_pool_cannot_be_given_back() -> None:
    members = joined(JOB)
    ((_, _, failed),) = answers(members.handle(b"worker-0", 3, m.ReturnSamples("x", 1, [(0, 1)]), 0.5))
    assert isinstance(failed, m.Failed)
    assert "there is no pool 'x' to give samples back to" in failed.text


def test_barrier_says_what_a_worker_has_trained_on() -> None:
    members = joined(JOB)

    def take(worker: int, number: int, done: int, round: int) -> m.Reply:
        body = m.TakeSamples("p", 6, number, 0, 3, done, round)
        return answers(members.handle(b"worker-%d" % worker, 2 + number, body, 0.5))[-1][2]

    def left(worker: int, round: int) -> m.Reply:
        return answers(members.handle(b"worker-%d" % worker, 9, m.AskSamples("p", round), 0.5))[0][2]

    assert left(0, 0) == m.SamplesLeft(False)
    take(0, 1, 0, 4)
    take(1, 1, 0, 6)
    assert left(0, 5) == m.SamplesLeft(True, 0, 0, [(3, 6)], [(1, [(3, 6)], 0.0)])
    assert take(1, 2, 1, 7) == m.PoolSamples([], False, True, 0)
    assert answers(members.handle(b"worker-1", 5, m.AwaitSamples("p"), 0.5)) == []
    over = m.PoolSamples([], True, False, 0)
    assert answers(members.handle(b"worker-0", 6, m.Enter("b", round=5), 0.6)) == [(b"worker-1", 5, over)]
    assert left(1, 7) == m.SamplesLeft(True, 0, 1, [], [])


def test_worker_that_leaves_its_loop_says_what_it_has_trained_on() -> None:
    pools = Pools(2, MembershipLog())
    pools.take(0, Waiting(b"0", 1), take(1, count=2))
    pools.take(0, Waiting(b"0", 2), take(2, count=2, done=1))
    assert pools.give_back(0, Waiting(b"0", 3), m.ReturnSamples("p", 2, [], 1)) == [Answer(b"0", 3, m.Done())]
    [answer] = pools.rest(1, Waiting(b"1", 1), m.AskSamples("p"))
    assert answer == Answer(b"1", 1, m.SamplesLeft(True, 0, 1, [], []))


def test_pool_goes_on_with_what_is_left_and_refuses_who_has_another_state() -> None:
    pools = Pools(2, MembershipLog())
    body = m.TakeSamples("p", 4, 1, 0, 9, 0, 0, 3, [(1, 2), (3, 4)])
    wrong = m.TakeSamples("p", 4, 1, 0, 9, 0, 0, 3, [(1, 9)])
    assert "not ascending ranges" in refusal(pools.take(0, Waiting(b"0", 1), wrong))
    assert pools.take(0, Waiting(b"0", 1), body) == [Answer(b"0", 1, m.PoolSamples([(1, 2), (3, 4)], False, False, 0))]
    other = m.TakeSamples("p", 4, 1, 0, 9, 0, 0, 3, [(1, 4)])
    assert "all workers load the same state" in refusal(pools.take(1, Waiting(b"1", 1), other))
