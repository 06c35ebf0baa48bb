"""Send and receive of two ranks, when one of them does not come."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from paceline.ddp import backend
from paceline.ddp.pairs import Pairs
from paceline.errors import DeadlineError, PacelineError
from paceline.testing import LocalJob, listen, tell
from paceline.wire import messages as m
from paceline.worker.current import current_session
from paceline.worker.session import Session


class Lonely:
    """Stands for a session in which the other ranks never come."""

    rank, servers = 0, ("one",)

    def __init__(self) -> None:
        self.asked: list[object] = []

    def ask_server(self, server: int, body: object, *rest: object) -> None:
        self.asked.append(body)

    def wait(self, calls: object, timeout_s: float) -> None:
        raise DeadlineError(f"it was not answered within {timeout_s:g} s")


@pytest.mark.parametrize("how", ["recv", "recv_any", "send"])
def test_operation_after_one_that_failed_fails_and_takes_no_message(how: str) -> None:
    session = Lonely()
    pairs = Pairs(cast("Session", session), "g", [0, 1])
    calls: dict[str, Any] = {
        "recv": lambda: pairs.recv(torch.zeros(1), 1, 7, 0.1),
        "recv_any": lambda: pairs.recv_any(torch.zeros(1), 7, 0.1),
        "send": lambda: pairs.send(torch.zeros(1), 1, 7, 0.1),
    }
    with pytest.raises(DeadlineError, match=r"not answered within 0.1 s"):
        calls[how]().wait()
    for retry in calls.values():
        with pytest.raises(PacelineError, match="before this one has failed") as caught:
            retry().wait()
        assert ("any rank" if how == "recv_any" else "rank 1") in str(caught.value)
        assert "open the group again on all ranks" in str(caught.value)
    assert len(session.asked) == 1


def send_to_nobody(tries: int) -> None:
    """Rank 0 sends, and rank 1 does not receive."""
    os.environ |= {"RANK": os.environ["PACELINE_RANK"], "WORLD_SIZE": "2"}
    backend.register()
    backend.replace_init()
    dist.init_process_group(timeout=timedelta(seconds=60))
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=0.2)) for _ in range(tries)]
    dist.barrier()
    tell("ready")
    listen()
    if dist.get_rank() == 0:
        for group in groups:
            with pytest.raises(DeadlineError):
                dist.send(torch.zeros(2**22), 1, group)
        current_session().call_server(0, m.GiveUp("another"), "waiting until it has given up")
        tell("given up")
        listen()
    dist.barrier()


def test_message_that_nobody_has_taken_in_time_does_not_stay_at_the_server() -> None:
    with LocalJob(2, 1, unix_sockets=False, shared_memory=False) as job:
        first, other = (job.start(rank, send_to_nobody, 6) for rank in range(2))
        assert [first.heard(), other.heard()] == ["ready", "ready"]
        before = job.servers[0].rss_bytes()
        first.tell("go on")
        other.tell("go on")
        assert first.heard() == "given up"
        assert job.servers[0].rss_bytes() - before < 4 * 2**24  # six times 16 MiB were sent
        first.tell("go on")
        assert [first.result(), other.result()] == [None, None]
