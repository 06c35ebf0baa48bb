"""An unchanged DDP script on two hosts, of which one takes no connection."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import Any

import pytest
from torch import distributed as dist

from paceline.c10d import backend
from tests.c10d.test_ddp import trained
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts


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
