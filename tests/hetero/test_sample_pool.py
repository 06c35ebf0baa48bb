"""The pool of samples: every index once per epoch, whoever dies."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.hetero.sample_pool import Given, Pool, PoolOver, Refused, Rest, Wait, WalkStart, positions
from paceline.layout.ranges import Ranges

WORKERS, LENGTH = 4, 23


def test_samples_are_handed_out_in_order_to_who_asks() -> None:
    pool = Pool(10, 2)
    assert pool.take(0, 1, 0, 4, 0) == [Given(0, 1, 0, ((0, 4),))]
    assert pool.take(1, 1, 0, 2, 0) == [Given(1, 1, 0, ((4, 6),))]
    assert pool.take(0, 2, 0, 9, 1) == [Given(0, 2, 0, ((6, 10),))]
    assert pool.done == ((0, 4),)
    assert pool.held() == {0: ((6, 10),), 1: ((4, 6),)}


def test_dead_workers_samples_go_to_one_that_waits() -> None:
    pool = Pool(6, 2)
    pool.take(0, 1, 0, 3, 0)
    pool.take(1, 1, 0, 3, 0)
    assert pool.take(1, 2, 0, 5, 1) == [Wait(1, 2)]
    assert pool.leave(0) == [Given(1, 2, 0, ((0, 3),))]
    assert pool.take(0, 2, 0, 3, 1) == [Refused(0, 2, "worker 0 has left")]


def test_epoch_ends_for_all_when_all_is_done() -> None:
    pool = Pool(4, 2)
    pool.take(0, 1, 0, 2, 0)
    pool.take(1, 1, 0, 2, 0)
    assert pool.take(0, 2, 0, 2, 1) == [Wait(0, 2)]
    assert pool.take(1, 2, 0, 2, 1) == [PoolOver(0, 2, 0), PoolOver(1, 2, 0)]
    assert pool.take(0, 3, 1, 2, 2) == [Given(0, 3, 1, ((0, 2),))]
    assert pool.take(1, 3, 0, 2, 2) == [PoolOver(1, 3, 0)]


def test_next_epoch_waits_for_this_one() -> None:
    pool = Pool(4, 2)
    pool.take(0, 1, 0, 2, 0)
    pool.take(1, 1, 0, 2, 0)
    assert pool.take(0, 2, 1, 2, 1) == [Wait(0, 2)]
    assert pool.finish(1, 1) == [Given(0, 2, 1, ((0, 2),))]
    assert pool.walk == 1


def test_samples_that_are_given_back_go_to_others_once() -> None:
    pool = Pool(6, 2)
    pool.take(0, 1, 0, 4, 0)
    pool.take(1, 1, 0, 2, 0)
    assert pool.take(1, 2, 0, 3, 1) == [Wait(1, 2)]
    assert pool.give_back(0, 1, ((1, 4),)) == [Given(1, 2, 0, ((1, 4),))]
    assert pool.give_back(0, 1, ((1, 4),)) == []
    assert pool.held() == {0: ((0, 1),), 1: ((1, 4),)}
    assert pool.give_back(0, 7, ((0, 1),)) == []
    assert pool.leave(0) == []
    assert pool.take(1, 3, 0, 3, 2) == [Given(1, 3, 0, ((0, 1),))]


def test_request_that_comes_twice_counts_once() -> None:
    pool = Pool(4, 1)
    first = pool.take(0, 1, 0, 2, 0)
    assert pool.take(0, 1, 0, 2, 0) == first
    assert pool.held() == {0: ((0, 2),)}


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ((0, 3, 0, 1, 0), "follows its request 1"),
        ((0, 2, 2, 1, 0), "walk 0 is not over"),
        ((0, 2, 0, 0, 0), "0 samples"),
        ((7, 1, 0, 1, 0), "has left"),
    ],
)
def test_senseless_request_is_refused(request_: tuple[int, int, int, int, int], why: str) -> None:
    pool = Pool(4, 1)
    pool.take(0, 1, 0, 2, 0)
    [answer] = pool.take(*request_)
    assert isinstance(answer, Refused)
    assert why in answer.reason
    assert pool.held() == {0: ((0, 2),)}


def test_worker_that_waits_cannot_ask_for_more() -> None:
    pool = Pool(1, 2)
    pool.take(0, 1, 0, 1, 0)
    assert pool.take(1, 1, 0, 1, 0) == [Wait(1, 1)]
    assert pool.take(1, 1, 0, 1, 0) == [Wait(1, 1)]
    [answer] = pool.take(1, 2, 0, 1, 0)
    assert isinstance(answer, Refused)


def test_continued_epoch_leaves_out_what_was_done() -> None:
    start = WalkStart(3, ((0, 1), (3, 5)))
    pool = Pool(6, 1, start)
    assert pool.rest(0, 0) == Rest(0, 3, ((0, 1), (3, 5)), {})
    assert pool.take(0, 1, 0, 9, 0, start=start) == [Given(0, 1, 0, ((0, 1), (3, 5)))]
    pool.check()
    pool.finish(0, 1)
    assert pool.rest(0, 0) == Rest(0, 4, (), {})
    assert pool.take(0, 2, 1, 9, 1, start=start.following(6)) == [Given(0, 2, 1, ((0, 6),))]


def test_walk_of_a_limited_size_ends_for_all_and_the_next_one_goes_on_with_the_epoch() -> None:
    start = WalkStart(0, limit=4, order=1)
    pool = Pool(6, 2, start)
    pool.take(0, 1, 0, 3, 0, start=start)
    pool.take(1, 1, 0, 3, 0, start=start)
    assert pool.held() == {0: ((0, 3),), 1: ((3, 4),)}
    assert pool.take(0, 2, 0, 3, 1, start=start) == [Wait(0, 2)]
    assert pool.take(1, 2, 0, 3, 1, start=start) == [PoolOver(0, 2, 0), PoolOver(1, 2, 0)]
    assert pool.rest(0, 9) == Rest(0, 0, ((4, 6),), {})
    second = start.following(6)
    assert second == WalkStart(0, ((4, 6),), 4, 1)
    assert pool.take(0, 3, 1, 3, 2, start=second) == [Given(0, 3, 1, ((4, 6),))]
    assert second.following(6) == WalkStart(1, (), 4, 1)
    pool.check()


def test_what_a_worker_has_pushed_for_is_done_before_it_asks_again() -> None:
    pool = Pool(6, 2)
    pool.take(0, 1, 0, 3, 0, 4)
    pool.take(1, 1, 0, 3, 0, 7)
    assert pool.take(1, 2, 0, 3, 1, 8) == [Wait(1, 2)]
    assert pool.pushed(0, 4) == []
    assert pool.rest(0, 4) == Rest(0, 0, ((0, 3),), {})
    assert pool.rest(1, 8) == Rest(0, 0, ((0, 3),), {0: ((0, 3),)})
    assert pool.rest(0, 5) == Rest(0, 1, (), {}), "the worker that asks has pushed since"
    assert pool.held()[0] == ((0, 3),), "a question changes nothing"
    assert pool.pushed(0, 5) == [PoolOver(1, 2, 0)]
    assert pool.pushed(7, 5) == []
    assert pool.rest(7, 5) == Rest(0, 1, (), {})


def test_epoch_that_all_workers_leave_is_not_finished() -> None:
    pool = Pool(6, 3)
    pool.take(0, 1, 0, 2, 0)
    assert pool.take(0, 2, 1, 2, 1) == [Wait(0, 2)]
    assert pool.take(1, 1, 1, 2, 0) == [Wait(1, 1)]
    pool.check()
    assert pool.leave(2) == [Given(0, 2, 1, ((0, 2),)), Given(1, 1, 1, ((2, 4),))]
    pool.check()


def test_worker_that_comes_late_finds_the_epochs_before_over() -> None:
    pool = Pool(2, 2)
    pool.take(0, 1, 0, 2, 0)
    pool.take(0, 2, 1, 1, 1)
    assert pool.take(1, 1, 0, 2, 0) == [PoolOver(1, 1, 0)]
    assert pool.take(1, 2, 1, 2, 1) == [Given(1, 2, 1, ((1, 2),))]


def test_workers_that_do_not_agree_on_a_walk_are_refused() -> None:
    pool = Pool(6, 2, WalkStart(2, ((0, 3),), order=1))
    [answer] = pool.take(0, 1, 0, 2, 0, start=WalkStart(2, order=8))
    assert isinstance(answer, Refused)
    assert answer.error == "ValueError"
    assert (
        "worker 0 walks through epoch 2, seed 7, the others through epoch 2 from position 0 on, seed 0" in answer.reason
    )
    pool.take(0, 1, 0, 3, 0, start=pool.start)
    assert pool.take(0, 2, 1, 3, 0, start=WalkStart(5)) == [Wait(0, 2)]
    [answer] = pool.take(1, 1, 1, 3, 0, start=WalkStart(6, limit=3))
    assert isinstance(answer, Refused)
    assert "epoch 6, 3 samples at a time, not shuffled, the others through epoch 5, not shuffled" in answer.reason
    assert pool.finish(0, 1) == [Given(0, 2, 1, ((0, 3),))]
    assert pool.start == WalkStart(5)


@pytest.mark.parametrize("left", [((0, 7),), ((3, 4), (1, 2)), ((2, 2),), ((0, 3), (2, 4))])
def test_walk_through_positions_that_make_no_sense_is_refused(left: Ranges) -> None:
    pool = Pool(6, 1)
    pool.take(0, 1, 0, 6, 0)
    [answer] = pool.take(0, 2, 1, 2, 1, start=WalkStart(1, left))
    assert isinstance(answer, Refused)
    assert "not ascending ranges within 6 samples" in answer.reason
    assert pool.held() == {0: ((0, 6),)}


class Job(RuleBasedStateMachine):
    """Workers that take, train, repeat requests and die, in any order; the ledger counts what was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(LENGTH, WORKERS)
        self.number = dict.fromkeys(range(WORKERS), 0)
        self.epoch = dict.fromkeys(range(WORKERS), 0)
        self.waits = dict.fromkeys(range(WORKERS), False)
        self.held: dict[int, dict[int, list[int]]] = {worker: {} for worker in range(WORKERS)}
        self.ledger: dict[int, Counter[int]] = {}
        self.last: dict[int, tuple[int, int, int, int, int, int]] = {}
        self.begun: dict[int, int] = {}
        """The epoch of the last samples of each worker."""
        self.left: set[int] = set()
        """Epochs that some worker has left early."""

    def note(self, answers: list[object]) -> None:
        for answer in answers:
            assert not isinstance(answer, Refused), answer
            self.waits[answer.worker] = isinstance(answer, Wait)  # type: ignore[attr-defined]
            if isinstance(answer, Given):
                assert answer.walk == self.epoch[answer.worker]
                self.held[answer.worker][answer.number] = positions(answer.ranges)
                self.begun[answer.worker] = answer.walk
            elif isinstance(answer, PoolOver):
                assert sorted(self.ledger.get(answer.walk, Counter()).elements()) == list(range(LENGTH))
                self.epoch[answer.worker] += 1

    def train(self, worker: int) -> None:
        for indices in self.held[worker].values():
            self.ledger.setdefault(self.epoch[worker], Counter()).update(indices)
        self.held[worker].clear()

    @rule(worker=st.integers(0, WORKERS - 1), count=st.integers(1, 9))
    def take(self, worker: int, count: int) -> None:
        if worker not in self.number or self.waits[worker]:
            return
        self.train(worker)
        done, self.number[worker] = self.number[worker], self.number[worker] + 1
        self.last[worker] = (worker, self.number[worker], self.epoch[worker], count, done, done)
        self.note(self.pool.take(*self.last[worker]))  # type: ignore[arg-type]

    @rule(worker=st.integers(0, WORKERS - 1), kept=st.integers(0, 5))
    def give_back(self, worker: int, kept: int) -> None:
        """Give back all but the first samples of what it holds."""
        for number, indices in self.held.get(worker, {}).items():
            self.held[worker][number] = indices[:kept]
            rest = tuple((index, index + 1) for index in indices[kept:])
            self.note(self.pool.give_back(worker, number, rest))  # type: ignore[arg-type]

    @rule(worker=st.integers(0, WORKERS - 1))
    def repeat(self, worker: int) -> None:
        if worker in self.last and self.held.get(worker):
            [answer] = self.pool.take(*self.last[worker])
            assert isinstance(answer, Given)
            # It may have given some of them back since.
            assert set(positions(answer.ranges)) >= set(self.held[worker][answer.number])

    @rule(worker=st.integers(0, WORKERS - 1))
    def come_to_a_barrier(self, worker: int) -> None:
        """Say, after a push, that it was pushed."""
        if worker in self.number and not self.waits[worker]:
            self.train(worker)
            self.note(self.pool.pushed(worker, self.number[worker]))  # type: ignore[arg-type]

    @rule(worker=st.integers(0, WORKERS - 1), has_pushed=st.booleans())
    def leave_the_loop(self, worker: int, has_pushed: bool) -> None:
        """Go on with the next epoch; what it has not pushed for goes back."""
        if self.begun.get(worker) != self.epoch[worker] or worker not in self.number or self.waits[worker]:
            return
        if has_pushed:
            self.come_to_a_barrier(worker)
        self.give_back(worker, 0)
        self.left.add(self.epoch[worker])
        self.epoch[worker] += 1

    @precondition(lambda self: len(self.number) > 1)
    @rule(worker=st.integers(0, WORKERS - 1), has_pushed=st.booleans())
    def die(self, worker: int, has_pushed: bool) -> None:
        """Die before or after the push for what it holds; each batch is one round."""
        if worker in self.number:
            round = self.number[worker] - 1
            if has_pushed and self.held[worker]:
                self.train(worker)
                round += 1
            del self.number[worker], self.held[worker]
            self.last.pop(worker, None)
            self.note(self.pool.leave(worker, round))  # type: ignore[arg-type]

    @invariant()
    def nothing_is_trained_on_twice(self) -> None:
        self.pool.check()
        for counts in self.ledger.values():
            assert not counts or max(counts.values()) == 1

    def teardown(self) -> None:
        """Whoever is left finishes the epochs."""
        for _ in range(4 * LENGTH):
            for worker in list(self.number):
                self.take(worker, 3)
        finished = set(range(self.pool.walk)) - self.left
        assert all(sum(self.ledger.get(epoch, Counter()).values()) == LENGTH for epoch in finished)
        assert self.pool.walk > 1


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
