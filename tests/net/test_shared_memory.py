"""Whose memory a server maps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paceline.errors import ProtocolError
from paceline.net.memory import SharedTensor, map_foreign
from paceline.server.members import Members
from paceline.wire import messages as m

HOLDS = """
import sys
from paceline.net.memory import SharedTensor
import torch
own = SharedTensor(8, torch.float32)
own.tensor.fill_(3.0)
print(own.fd, flush=True)
sys.stdin.read()
"""


def test_memory_of_another_process_is_mapped_but_not_what_it_has_from_this_one() -> None:
    ours = SharedTensor(8, torch.float32)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[ours.fd], text=True
    ) as other:
        assert other.stdout is not None
        theirs = map_foreign(other.pid, int(other.stdout.readline()), 8, torch.float32)
        assert theirs.tolist() == [3.0] * 8
        with pytest.raises(ProtocolError, match="was made by this process"):
            map_foreign(other.pid, ours.fd, 8, torch.float32)
        other.communicate()
    ours.close()


def test_memory_that_nobody_closes_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(100):
        SharedTensor(8, torch.float32)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    kept = SharedTensor(8, torch.float32)
    kept.close()
    other = os.open("/dev/null", os.O_RDONLY)  # gets the number that has become free
    assert other == kept.fd
    del kept
    os.close(other)


def member(role: str, rank: int, host_id: str, pid: int) -> m.Member:
    return m.Member(role, rank, 0, "host", host_id, pid, "", b"token")


@pytest.mark.parametrize(("worker", "pid"), [(0, 12), (1, 12), (1, 11)])
def test_workers_offer_their_own_memory_only(worker: int, pid: int) -> None:
    """Process 12 of this host is nobody's, and 11 is a number of another host."""
    peers = Members([member("worker", 0, "here", 10), member("worker", 1, "there", 11)], "here", 0)
    peers.check_memory(0, 10)
    with pytest.raises(ProtocolError, match=f"worker {worker} offers memory of process {pid}"):
        peers.check_memory(worker, pid)
