"""Workers that train fewer rounds than others."""

from __future__ import annotations

import pytest

from paceline.membership import Membership, Warn
from paceline.membership.effects import Action
from paceline.wire import messages as m
from tests.membership.test_machine import JOB, joined

THREE = JOB.replace(num_workers=3)


def beat(members: Membership, worker: int, round: int, now: float) -> None:
    members.handle(b"worker-%d" % worker, round + 2, m.Heartbeat(round), now)


def lines(actions: list[Action]) -> list[str]:
    return [one.text for one in actions if isinstance(one, Warn)]


def trained(rounds: list[int]) -> Membership:
    """A job whose workers have trained some rounds."""
    members = joined(THREE)
    for worker, round in enumerate(rounds):
        beat(members, worker, round, 1.0)
    return members


def test_worker_that_leaves_while_others_train_on_is_named_once() -> None:
    members = trained([7, 7, 7])
    members.handle(b"worker-1", 99, m.Bye("", 7), 1.0)
    assert lines(members.tick(1.5)) == []
    beat(members, 0, 8, 2.0)
    assert lines(members.tick(2.5)) == [
        "worker 1 on h (pid 9) left the job after round 7; the others train on without it (worker 0 is in round 8)"
    ]
    beat(members, 2, 9, 3.0)
    assert lines(members.tick(3.5)) == []


def test_fast_worker_that_has_done_its_part_is_not_named() -> None:
    members = trained([9, 3, 5])
    members.handle(b"worker-0", 99, m.Bye("", 9), 1.0)
    beat(members, 1, 9, 2.0)
    assert lines(members.tick(2.5)) == []


def test_worker_at_a_barrier_is_named_when_others_train_on() -> None:
    members = trained([7, 6, 7])
    members.handle(b"worker-1", 99, m.Enter("end", "s", 7), 1.0)
    assert lines(members.tick(1.5)) == []
    beat(members, 2, 8, 2.0)
    (line,) = lines(members.tick(2.5))
    assert "worker 1 on h (pid 9) waits at a barrier after round 7; the others train on without it" in line


def test_worker_at_a_barrier_is_named_when_others_have_trained_on_and_come_at_once() -> None:
    """With steps of milliseconds they come before their next heartbeat, and so before the next tick."""
    members = trained([7, 7, 7])
    assert lines(members.handle(b"worker-1", 99, m.Enter("end", "s", 7), 1.0)) == []
    (line,) = lines(members.handle(b"worker-0", 99, m.Enter("end", "s", 9), 1.1))
    assert line.startswith("worker 1 on h (pid 9) waits at a barrier after round 7; the others train on without it")
    assert lines(members.handle(b"worker-2", 99, m.Enter("end", "s", 9), 1.1)) == []


def test_workers_that_come_to_a_barrier_after_the_same_round_are_not_named() -> None:
    members = trained([7, 5, 6])
    for worker in range(3):
        assert lines(members.handle(b"worker-%d" % worker, 99, m.Enter("end", "s", 9), 1.0)) == []


def test_worker_in_a_gather_is_not_taken_for_one_that_stopped() -> None:
    members = trained([7, 6, 7])  # its heartbeat is older than its request
    members.handle(b"worker-1", 99, m.Gather("g", b""), 1.0)
    assert lines(members.tick(2.5)) == []


@pytest.mark.parametrize(
    ("rounds", "line"),
    [
        ([8, 8, 8], None),
        ([8, 7, 8], "not all workers have trained as many rounds: 8 by workers 0, 2; 7 by worker 1"),
        ([8, 8, 5], "not all workers have trained as many rounds: 8 by workers 0-1; 5 by worker 2"),
    ],
)
def test_rounds_that_differ_are_told_at_the_end(rounds: list[int], line: str | None) -> None:
    members = trained(rounds)
    found = [
        text
        for worker, round in enumerate(rounds)
        for text in lines(members.handle(b"worker-%d" % worker, 99, m.Bye("", round), 2.0))
    ]
    assert found == ([line] if line else [])


def test_unequal_rounds_of_a_pool_are_its_purpose() -> None:
    members = trained([7, 7, 7])
    members.handle(b"worker-0", 98, m.TakeSamples("p", 8, 1, 0, 2, 0, 0), 1.0)
    members.handle(b"worker-1", 99, m.Bye("", 5), 1.0)
    beat(members, 0, 8, 2.0)
    assert lines(members.tick(2.5)) == []
    for worker, round in ((0, 9), (2, 7)):
        assert lines(members.handle(b"worker-%d" % worker, 99, m.Bye("", round), 3.0)) == []
