"""Weights of workers that step alike: compared by their sums, after the same steps."""

from __future__ import annotations

import math

import pytest

from paceline.membership import Warn
from paceline.membership.told_steps import ToldSteps
from paceline.wire import messages as m
from tests.membership.test_machine import JOB, joined

THREE = range(3)


def sums(step: int, *totals: float, store: str = "s") -> list[m.WorkerStep]:
    """Sums of parameters a, b, ..., each of which may differ by 0.1."""
    return [m.WorkerStep(store, step, [("abcdef"[number], one, 0.1) for number, one in enumerate(totals)])]


def lines(same: ToldSteps, *said: tuple[int, list[m.WorkerStep]], live: range = THREE) -> list[str]:
    """Take in what workers say, in this order; return the lines."""
    found = []
    for worker, steps in said:
        same.note(worker, steps)
        found += same.check(lambda: live)
    return found


def test_equal_weights_are_no_news() -> None:
    same = ToldSteps()
    assert lines(same, *((worker, sums(4, 1.0, 2.0)) for worker in THREE)) == []


def test_rounding_is_no_difference_and_more_is() -> None:
    assert lines(ToldSteps(), (0, sums(1, 1.0)), (1, sums(1, 1.09)), (2, sums(1, 0.91))) == []
    assert len(lines(ToldSteps(), (0, sums(1, 1.0)), (1, sums(1, 1.11)), live=range(2))) == 1


def test_the_line_names_the_workers_the_parameter_and_the_way_out() -> None:
    [line] = lines(ToldSteps(), (2, sums(8, 1, 2, 3)), (0, sums(8, 1, 2, 3)), (1, sums(8, 1, 5, 6)))
    assert line.startswith("worker 1 has other weights than workers 0, 2 after step 8: parameter 'b' and 1 more.")
    assert "optimizer.broadcast_weights() on every worker" in line


def test_worker_0_that_alone_loads_a_checkpoint_is_the_odd_one_and_with_two_workers_it_is_the_other() -> None:
    [line] = lines(ToldSteps(), (0, sums(1, 5)), (1, sums(1, 1)), (2, sums(1, 1)))
    assert line.startswith("worker 0 has other weights than workers 1-2 after step 1: parameter 'a'. ")
    [line] = lines(ToldSteps(), (0, sums(1, 5)), (1, sums(1, 1)), live=range(2))
    assert line.startswith("worker 1 has other weights than worker 0")


def test_workers_that_are_all_apart_are_all_named() -> None:
    [line] = lines(ToldSteps(), *((worker, sums(1, worker)) for worker in THREE))
    assert line.startswith("workers 1-2 have other weights than worker 0")


def test_the_same_difference_is_said_once_and_another_one_again() -> None:
    same = ToldSteps()
    for step in (1, 2, 4):
        assert len(lines(same, (0, sums(step, 1)), (1, sums(step, 1)), (2, sums(step, 3)))) == (step == 1)
    assert len(lines(same, (0, sums(8, 1)), (1, sums(8, 2)), (2, sums(8, 3)))) == 1


def test_sums_of_other_steps_and_other_stores_are_not_compared() -> None:
    said = [(0, sums(1, 1)), (1, sums(2, 5)), (2, sums(1, 1)), (0, sums(2, 5)), (2, sums(2, 5)), (1, sums(1, 1))]
    assert lines(ToldSteps(), *said) == []
    pair = [(0, sums(1, 1, store="generator")), (1, sums(1, 5, store="critic"))]
    assert lines(ToldSteps(), *pair, live=range(2)) == []


def test_worker_that_has_left_is_not_waited_for() -> None:
    same = ToldSteps()
    assert lines(same, (0, sums(1, 1)), (1, sums(1, 5))) == []
    assert len(lines(same, (0, sums(2, 1)), live=range(2))) == 1


def test_sums_of_a_silent_worker_do_not_pile_up() -> None:
    same = ToldSteps()
    found = lines(same, *((worker, sums(step, worker)) for step in range(1, 40) for worker in (0, 1)))
    assert len(found) == 1
    assert len(same._found) <= 8


@pytest.mark.parametrize(("one", "other", "differ"), [(math.nan, math.nan, False), (math.inf, 1.0, True)])
def test_values_that_are_not_finite_are_alike(one: float, other: float, differ: bool) -> None:
    assert len(lines(ToldSteps(), (0, sums(1, one)), (1, sums(1, other)), live=range(2))) == differ


def test_heartbeats_carry_the_sums() -> None:
    members = joined(JOB.replace(num_workers=2))
    for worker in range(2):
        beat = m.Heartbeat(1, steps=sums(1, float(worker)))
        members.handle(b"worker-%d" % worker, 2, beat, 1.0)
    [line] = [one.text for one in members.tick(1.1) if isinstance(one, Warn)]
    assert "worker 1 has other weights than worker 0" in line


def test_workers_that_have_left_before_their_sums_are_compared_are_compared_with_all_others() -> None:
    members = joined(JOB.replace(num_workers=3))
    for worker, total in enumerate((3.0, 1.0, 1.0)):
        members.handle(b"worker-%d" % worker, 2, m.Heartbeat(1, steps=sums(1, total)), 1.0)
    members.handle(b"worker-2", 3, m.Bye("", 1), 1.0)
    [line] = [one.text for one in members.tick(1.1) if isinstance(one, Warn)]
    assert line.startswith("worker 0 has other weights than workers 1-2 after step 1")
