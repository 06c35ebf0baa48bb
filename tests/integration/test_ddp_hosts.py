"""Jobs on hosts that take no connection: workers behind routers with one address, and behind a packet filter."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import Any

import pytest
import torch
from torch import distributed as dist

import paceline
from paceline.ddp import backend
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts
from tests.ddp.test_ddp import trained


def digest() -> str:
    """Train over the job's connections alone, as a script does; returns what the weights are."""
    os.environ |= {"RANK": os.environ["PACELINE_RANK"], "WORLD_SIZE": os.environ["PACELINE_NUM_WORKERS"]}
    backend.register()
    backend.replace_init()
    dist.init_process_group("nccl")
    weights = trained("plain", None).parameters()  # buffers are those of rank 0 before each forward pass only
    content = b"".join(one.detach().numpy().tobytes() for one in weights)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.sha256(content).hexdigest())
    dist.barrier()
    assert len(set(found)) == 1
    return str(found[0])


@pytest.mark.root
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")
@pytest.mark.skipif(shutil.which("iptables") is None, reason="iptables refuses connections")
def test_ranks_train_where_nobody_can_connect_to_a_worker() -> None:
    with Hosts(2) as hosts:
        hosts[1].run("iptables -A INPUT -p tcp --syn -i eth0 -j DROP")
        with HostsJob(hosts, workers=[1, 2], servers=[1, 0]) as job:
            assert len(set(job.run(digest))) == 1


def digest_and_store() -> list[Any]:
    """Train over the job's connections, send to the other rank, and train with a store."""
    found: list[Any] = [digest()]
    rank, got = dist.get_rank(), torch.zeros(1000)
    sending = dist.isend(torch.full((1000,), 1.0 + rank), 1 - rank)
    dist.recv(got, 1 - rank)
    sending.wait()
    torch.manual_seed(rank)
    net = torch.nn.Linear(100, 100)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), "dist_sync", model=net)
    for _ in range(3):
        net(torch.ones(2 + rank, 100)).square().mean().backward()
        optimizer.step()
    optimizer.kvstore.barrier()
    return [*found, float(net.weight.detach().double().sum()), got[0].item() - 1.0 == 1 - rank]


@pytest.mark.root
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")
@pytest.mark.skipif(shutil.which("iptables") is None, reason="iptables masquerades")
def test_workers_behind_two_routers_with_one_address_each_train_together() -> None:
    with Hosts(3, masked=(1, 2)) as hosts, HostsJob(hosts, workers=[0, 1, 1], servers=[2, 0, 0]) as job:
        for one in (1, 2):
            with pytest.raises(OSError, match="unreachable"):
                hosts[0].run(f"ip route get {hosts[one].address}")
        first, second = job.run(digest_and_store)
    assert first == second
    assert first[2]
