"""A store whose workers change their groups: what each of them reads then; one server, in memory."""

from __future__ import annotations

import pytest
import torch

from paceline.consistency import Policy
from paceline.updaters import make_spec
from paceline.wire import messages as m
from tests.server.test_bucket import NUMEL, OneServer

GROUPS = [[0], [1, 2]]


def weights(server: OneServer, rank: int, seq: int) -> torch.Tensor:
    assert isinstance(server.answer(rank, seq), m.Values), server.answer(rank, seq)
    return torch.frombuffer(server.frames(rank, seq)[0], dtype=torch.float32)


def step(server: OneServer, rank: int, round: int) -> int:
    return server.push(rank, [(0, NUMEL, round)], torch.ones(NUMEL))


def move(server: OneServer, rank: int) -> None:
    seq = server.ask(rank, m.Regroup("s", 1, GROUPS))
    assert isinstance(server.answer(rank, seq), m.Done)


@pytest.fixture
def server() -> OneServer:
    """A server after round 1 of one group of all workers; worker 0 has moved to a group of its own."""
    found = OneServer(Policy("groups", ((0, 1, 2),)), make_spec("sgd", lr=1.0))
    for rank in range(3):
        step(found, rank, 1)
    move(found, 0)
    return found


def test_job_of_one_group_that_is_divided_keeps_what_each_part_knows(server: OneServer) -> None:
    before = torch.linspace(-1.0, 1.0, NUMEL) - 1
    torch.testing.assert_close(weights(server, 0, step(server, 0, 2)), before - 1)
    pull = m.Pull("s", [m.Entry(0, 0, 0, NUMEL, 1)], False)
    torch.testing.assert_close(weights(server, 1, server.ask(1, pull)), before, msg="its group has made no update yet")
    for rank in (1, 2):
        move(server, rank)
    torch.testing.assert_close(weights(server, 1, server.ask(1, pull)), before - 1, msg="the values as it moved")
    first, last = step(server, 1, 2), step(server, 2, 2)
    for rank, seq in ((1, first), (2, last)):
        torch.testing.assert_close(weights(server, rank, seq), before - 2)


def test_move_said_twice_changes_nothing_and_one_in_mid_round_is_refused(server: OneServer) -> None:
    move(server, 0)
    move(server, 1)
    waiting = step(server, 1, 2)
    assert server.answer(1, waiting) is None, "worker 2 has not come"
    assert "before round 2 was answered" in server.refusal(1, server.ask(1, m.Regroup("s", 2, [[0, 1, 2]])))
    move(server, 2)
    step(server, 2, 2)
    assert isinstance(server.answer(1, waiting), m.Values), "the groups are those of generation 1"


def test_who_has_moved_or_left_is_not_waited_for_by_the_sum(server: OneServer) -> None:
    """Else pushes of the others would be held, each with its own memory, until the cohort is complete."""
    [slot] = server.bucket.slots
    step(server, 1, 2)
    [accumulator] = slot.cohorts.values()
    assert accumulator._expected == [[2]]
    step(server, 2, 2)
    server.ask(2, m.Leave("s"))
    step(server, 1, 3)
    assert not slot.cohorts, "worker 1 is alone"
    job = OneServer(Policy(), make_spec("sgd", lr=1.0))
    for rank in range(3):
        step(job, rank, 1)
    job.ask(0, m.Leave("s"))
    step(job, 1, 2)
    [accumulator] = job.bucket.slots[0].cohorts.values()
    assert accumulator._expected == [[2]]
