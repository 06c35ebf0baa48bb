"""Children that a rank forks (a loader, a pool) take no part in its groups, and do not hide its death."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from paceline.errors import PacelineError
from paceline.testing import LocalJob, tell
from tests.clusters.forked import errors_in_a_child, fork_in_c, forked
from tests.ddp.test_backend import open_group

NOTICED_WITHIN_S = 6.0

WAYS = {"shared": {}, "servers": {"shared_memory": False}}


def work_in_a_child() -> list[Any]:
    rank = open_group()
    pair = dist.new_group([0, 1])
    found, ones = {}, torch.ones(3)
    if rank == 0:
        late = dist.all_reduce(torch.ones(1), async_op=True)
        found = errors_in_a_child({
            "all_reduce": lambda: dist.all_reduce(torch.full((3,), 100.0)),
            "in a group": lambda: dist.broadcast(torch.full((3,), 100.0), 0, group=pair),
            "asynchronous": lambda: dist.all_reduce(torch.full((3,), 100.0), async_op=True).wait(),
            "barrier": dist.barrier,
            "send": lambda: dist.send(torch.full((3,), 100.0), 1),
            "objects": lambda: dist.all_gather_object([None, None], "of a child"),
            "the parent's": late.wait,
            "destroy": dist.destroy_process_group,
        })  # fmt: skip
        late.wait()
        dist.send(ones, 1)
    else:
        time.sleep(0.5)  # the parent's operation is under way at the fork
        dist.all_reduce(torch.ones(1))
        dist.recv(ones, 0)
    dist.all_reduce(ones)
    dist.all_reduce(ones, group=pair)
    return [found, os.getpid(), ones.tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_operations_in_a_child_say_why_they_cannot_run_and_reach_nobody(way: str) -> None:
    with LocalJob(2, 1, timeout_s=60, **WAYS[way]) as job:
        (found, pid, total), (_, _, other) = job.run(work_in_a_child)
    assert total == other == [4.0] * 3
    assert (found.pop("end"), found.pop("destroy")) == ("0", "nothing")
    assert len(found) == 7
    assert (
        f"was forked from the process that has called all_reduce of 1 elements of group '0' (pid {pid})"
        in found.pop("the parent's")
    )
    for name, text in found.items():
        assert f"was forked from worker 0 (pid {pid})" in text, name


def fork_and_wait_to_be_killed(in_c: bool) -> list[Any]:
    rank = open_group()
    child = 0
    if rank == 1:
        child = fork_in_c(120) if in_c else forked(lambda: time.sleep(120))
    dist.barrier()
    tell(child)
    try:
        while True:
            dist.all_reduce(torch.ones(3))
            time.sleep(0.01)
    except PacelineError as error:
        return [str(error), time.monotonic()]


@pytest.mark.parametrize("in_c", [False, True])
def test_death_of_a_rank_is_noticed_although_its_child_lives_on(in_c: bool) -> None:
    with LocalJob(2, 1, timeout_s=60) as job:
        workers = job.start_all(fork_and_wait_to_be_killed, in_c)
        child = [worker.heard() for worker in workers][1]
        killed = time.monotonic()
        workers[1].kill(signal.SIGKILL)
        text, when = workers[0].result(90)
        assert Path(f"/proc/{child}").exists()
        os.kill(child, signal.SIGKILL)
    assert "worker 1 on 127.0.0.1 died" in text
    assert when - killed < NOTICED_WITHIN_S
