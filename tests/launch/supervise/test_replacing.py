"""When workers that have died are started again."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from paceline.host.exitcodes import WORKER_LOST
from paceline.launch.job_spec import Graces, JobSpec
from paceline.launch.plan import SCHEDULER, ProcessName
from paceline.launch.supervise import events as e
from paceline.launch.supervise.lifecycle import JobLifecycle, Phase
from paceline.launch.supervise.replacing import LONGEST_PAUSE_S, Replacing

ZERO, ONE = ProcessName("worker", 0), ProcessName("worker", 1)


def job(replace: int = 2) -> JobLifecycle:
    members = [SCHEDULER, ZERO, ONE]
    lifecycle = JobLifecycle(members, Graces(), 0.0, may_go_on=True, replace=replace)
    lifecycle.begin()
    for number, member in enumerate(members):
        lifecycle.handle(e.Started(member, f"pid {number}"), 0.0)
        if member == SCHEDULER:
            lifecycle.handle(e.Ready("tcp://h:1"), 0.0)
    lifecycle.handle(e.Complete(), 0.0)
    return lifecycle


def die(lifecycle: JobLifecycle, now: float, code: int = 137) -> None:
    lifecycle.handle(e.Exited(ONE, code), now)
    lifecycle.handle(e.Lost(ONE, "killed by SIGKILL (exit code 137)", True), now)
    lifecycle.check()


def start_again(lifecycle: JobLifecycle, now: float) -> None:
    assert e.StartProcesses((ONE,)) in lifecycle.handle(e.Tick(), now)
    lifecycle.handle(e.Started(ONE, "pid 9"), now)
    lifecycle.check()


def test_pauses_grow_with_each_death_and_starts_are_counted() -> None:
    replacing = Replacing(9)
    pauses = []
    for _ in range(9):
        assert replacing.note_death(ONE, 100.0)
        assert replacing.deadline is not None
        pauses.append(replacing.deadline - 100.0)
        assert replacing.take_due(99.0) == ()
        assert replacing.take_due(200.0) == (ONE,)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert not replacing.note_death(ONE, 300.0)
    assert (replacing.number(ONE), replacing.number(ZERO), replacing.deadline) == (9, 0, None)


def test_job_whose_dead_worker_was_replaced_ends_with_0() -> None:
    lifecycle = job()
    die(lifecycle, 1.0)
    assert lifecycle.next_at == 1.0
    start_again(lifecycle, 1.0)
    lifecycle.handle(e.TakenOver(ONE), 3.0)
    for member in (ZERO, ONE):
        lifecycle.handle(e.Exited(member, 0), 5.0)
    lifecycle.handle(e.Over(), 5.0)
    assert lifecycle.handle(e.Exited(SCHEDULER, 0), 6.0) == [e.JobEnded(0)]


def test_process_that_dies_before_it_joins_is_started_again_until_there_were_enough() -> None:
    lifecycle = job()
    die(lifecycle, 1.0)
    start_again(lifecycle, 1.0)
    lifecycle.handle(e.Exited(ONE, 1), 2.0)
    assert lifecycle.next_at == 3.0
    assert lifecycle.handle(e.Tick(), 2.5) == []
    start_again(lifecycle, 3.0)
    lifecycle.handle(e.Exited(ONE, 1), 4.0)
    assert lifecycle.next_at is None
    lifecycle.handle(e.Exited(ZERO, 0), 5.0)
    assert lifecycle.phase is Phase.LEAVING
    lifecycle.handle(e.Over(), 5.0)
    assert lifecycle.handle(e.Exited(SCHEDULER, WORKER_LOST), 6.0) == [e.JobEnded(WORKER_LOST)]


def test_process_that_has_not_joined_when_the_job_ends_is_killed_and_is_no_failure() -> None:
    lifecycle = job()
    die(lifecycle, 1.0)
    start_again(lifecycle, 1.0)
    lifecycle.handle(e.Exited(ZERO, 0), 5.0)
    assert lifecycle.handle(e.Over(), 5.0) == [e.Signal(signal.SIGKILL, (ONE,))]
    lifecycle.handle(e.Exited(ONE, 137), 5.1)
    assert lifecycle.handle(e.Exited(SCHEDULER, WORKER_LOST), 6.0) == [e.JobEnded(WORKER_LOST)]


def test_nobody_is_started_once_the_job_ends() -> None:
    lifecycle = job()
    die(lifecycle, 1.0)
    lifecycle.handle(e.Exited(ZERO, 0), 1.0)
    lifecycle.handle(e.Over(), 1.0)
    assert not any(isinstance(one, e.StartProcesses) for one in lifecycle.handle(e.Tick(), 1.1))
    assert lifecycle.handle(e.Exited(SCHEDULER, WORKER_LOST), 2.0) == [e.JobEnded(WORKER_LOST)]


def test_process_that_was_taken_for_dead_and_runs_is_killed_before_another_one_starts() -> None:
    lifecycle = job(replace=1)
    told = lifecycle.handle(e.Lost(ONE, "silent", True), 1.0)
    assert told[1:] == [e.Signal(signal.SIGKILL, (ONE,))]
    lifecycle.handle(e.Exited(ONE, 137), 1.5)
    start_again(lifecycle, 1.5)
    lifecycle.handle(e.TakenOver(ONE), 2.0)
    assert len(lifecycle.handle(e.Lost(ONE, "silent", True), 3.0)) == 1, "there is no other one"


def test_process_that_cannot_be_started_again_is_another_death() -> None:
    lifecycle = job(replace=1)
    die(lifecycle, 1.0)
    assert e.StartProcesses((ONE,)) in lifecycle.handle(e.Tick(), 1.0)
    ((line),) = lifecycle.handle(e.NotStarted(ONE, "host h2 is gone"), 1.0)
    assert line == e.ShowLine("worker 1 could not be started again: host h2 is gone")
    assert lifecycle.phase is Phase.RUNNING
    assert lifecycle.next_at is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"replace": -1}, "0 or more"),
        ({"ddp": True}, "not with --ddp"),
        ({"num_servers": 0}, "without servers"),
        ({"settings": {"on_worker_death": "stop"}}, "leave out one"),
    ],
)
def test_jobs_whose_workers_cannot_be_replaced_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        JobSpec(**{"command": ("python", "train.py"), "num_workers": 2, "replace": 1, **changes})
