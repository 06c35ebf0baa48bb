"""Children that a rank forks (a loader, a pool) know the ranks and take no part, and do not hide a death."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from tests.clusters.forked import errors_in_a_child, fork_in_c, forked
from tests.hvd.ranks import Ranks, run

NOTICED_WITHIN_S = 6.0

WAYS = {"shared": {}, "gloo": {"PACELINE_SHARED_MEMORY": "0"}}


def operations_in_a_child() -> list[Any]:
    import paceline.hvd as hvd

    hvd.init()
    found: dict[str, str] = {}
    if hvd.rank() == 0:
        late = hvd.allreduce_async(torch.ones(1), name="late")

        def tell_ranks() -> None:
            raise PacelineError(f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()}")

        found = errors_in_a_child({
            "ranks": tell_ranks,
            "allreduce": lambda: hvd.allreduce(torch.full((3,), 100.0), name="early"),
            "asynchronous": lambda: hvd.allreduce_async(torch.full((3,), 100.0), name="early"),
            "the parent's": lambda: hvd.synchronize(late),
            "objects": lambda: hvd.broadcast_object("of a child", 0),
            "barrier": hvd.barrier,
            "init": hvd.init,
            "shutdown": hvd.shutdown,
            "init again": hvd.init,
        })  # fmt: skip
        hvd.synchronize(late)
    else:
        time.sleep(0.5)  # the parent's operation is under way at the fork
        hvd.allreduce(torch.ones(1), name="late")
    total = hvd.allreduce(torch.ones(3), name="early", op=hvd.Sum)
    hvd.shutdown()
    return [found, os.getpid(), total.tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_operations_in_a_child_say_why_they_cannot_run_and_reach_nobody(way: str) -> None:
    (found, pid, total), (_, _, other) = run(operations_in_a_child, 2, environment=WAYS[way])
    assert total == other == [2.0] * 3
    assert [found.pop(one) for one in ("end", "ranks", "init", "shutdown")] == [
        "0", "rank 0 of 2, 0 of 2", "nothing", "nothing"
    ]  # fmt: skip
    assert len(found) == 6
    for name, text in found.items():
        assert f"was forked from rank 0 (pid {pid})" in text, name


def wait_to_be_killed(killed: int, in_c: bool) -> list[Any]:
    import paceline.hvd as hvd

    hvd.init()
    if hvd.rank() == killed:
        child = fork_in_c(120) if in_c else forked(lambda: time.sleep(120))
        hvd.allreduce(torch.ones(3), name="first")
        print(child, flush=True)
    else:
        hvd.allreduce(torch.ones(3), name="first")
    try:
        while True:
            hvd.allreduce(torch.ones(3), name="step")
    except PacelineError as error:
        return [str(error), time.monotonic()]


@pytest.mark.parametrize(("rank", "in_c"), [(1, False), (1, True), (0, True)])
def test_death_of_a_rank_is_noticed_although_its_child_lives_on(rank: int, in_c: bool) -> None:
    ranks = Ranks(wait_to_be_killed, 2, rank, in_c)
    deadline = time.monotonic() + 60.0
    while not ranks.output(rank).endswith("\n"):
        assert time.monotonic() < deadline, ranks.output(rank)
        time.sleep(0.05)
    child, killed = int(ranks.output(rank)), time.monotonic()
    ranks.children[rank].send_signal(signal.SIGKILL)
    assert ranks.children[1 - rank].wait(60.0) == 0, ranks.output(1 - rank)
    text, when = ranks.result(1 - rank)
    assert Path(f"/proc/{child}").exists()
    os.kill(child, signal.SIGKILL)
    assert f"rank {rank}" in text
    assert "ended" in text
    assert when - killed < NOTICED_WITHIN_S
