"""What the network between hosts sees of the Horovod interface."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import paceline.hvd as hvd
from paceline.net import new_job_key
from tests.clusters.hosts import Hosts, why_no_hosts
from tests.hvd.ranks import Ranks

TENSOR = bytes(range(256)) * 64
OBJECT = b"an object of rank 0 " * 2000
_CLONE_NEWNET = 0x40000000
_ALL_PROTOCOLS = 3


def enter_network(pid: int) -> None:
    """Have this thread, and those that it starts, use the network of a process."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        assert ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) == 0
    finally:
        os.close(fd)


def open_tap(pid: int) -> socket.socket:
    """Return a socket that gets all packets of a loopback device."""
    enter_network(pid)
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    tap.bind(("lo", 0))
    tap.settimeout(0.1)
    return tap


def broadcast_both(pid: int) -> str:
    """Send a tensor and an object to rank 1."""
    enter_network(pid)
    hvd.init()
    mine = hvd.rank() == 0
    tensor = torch.tensor(list(TENSOR) if mine else [0] * len(TENSOR), dtype=torch.uint8)
    hvd.broadcast_(tensor, 0, name="tensor")
    assert bytes(tensor.tolist()) == TENSOR
    assert hvd.broadcast_object(OBJECT if mine else None) == OBJECT
    return "both came"


@pytest.mark.root
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")
@pytest.mark.parametrize("encrypt", ["0", "1"], ids=["plain", "encrypted"])
def test_network_sees_the_tensors_that_gloo_moves_and_no_object(encrypt: str) -> None:
    environment = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "1",
        "PACELINE_JOB_KEY": new_job_key(), "PACELINE_ENCRYPT": encrypt,
    }  # fmt: skip
    with Hosts(1) as hosts, ThreadPoolExecutor(1) as another_thread:
        hosts[0].run("ip link set lo up")
        pid = hosts[0]._namespace.pid
        seen = bytearray()
        with another_thread.submit(open_tap, pid).result() as tap:
            ranks = Ranks(
                broadcast_both,
                2,
                pid,
                environment=environment,
                by_rank=lambda rank: {"HOROVOD_HOSTNAME": f"host-{rank}"},
            )
            running = True
            while running:
                running = any(child.poll() is None for child in ranks.children)
                with contextlib.suppress(TimeoutError):  # what came before the ranks ended may still wait here
                    while True:
                        seen += tap.recv(1 << 17)
    assert ranks.results() == ["both came"] * 2
    assert TENSOR[:512] in seen
    assert OBJECT[:100] not in seen
