"""A script's default device and dtype change nothing; ``tests/layout/test_tensors.py`` looks at the code."""

from __future__ import annotations

from typing import Any

import torch

import paceline
import paceline.hvd as hvd
from paceline.testing import LocalJob


def train(dtype: str | None) -> list[list[float]]:
    """Train in several ways; with a dtype it and a device without values are the defaults of the script."""
    ways: list[tuple[str, dict[str, Any]]] = [
        ("dist_sync", {"update": "worker"}),
        ("dist_sync", {"update": "server", "compression": "2bit"}),
        ("allreduce", {}),
        ("hvd", {}),
    ]
    found = []
    for kvstore, options in ways:
        torch.manual_seed(3)
        layers = torch.nn.EmbeddingBag(50, 6, sparse=kvstore != "hvd"), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
        net, inputs = torch.nn.Sequential(*layers), torch.arange(24).reshape(4, 6)
        if dtype is not None:
            torch.set_default_dtype(getattr(torch, dtype))
            torch.set_default_device("meta")
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        if kvstore == "hvd":
            hvd.init()
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters())
        else:
            optimizer = paceline.DistributedOptimizer(inner, kvstore, model=net, batch_dim=0, **options)
        for _ in range(4):
            optimizer.zero_grad()
            net(inputs).square().sum().backward()
            optimizer.step()
        found.append(torch.cat([one.detach().flatten() for one in net.parameters()]).tolist())
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return found


def train_twice() -> list[list[list[float]]]:
    return [train(None), train("bfloat16")]


def test_default_device_and_dtype_of_a_script_change_no_bit() -> None:
    with LocalJob(2, 1) as job:
        for plain, other in job.run(train_twice):
            assert other == plain
