"""A worker's memory of its requests does not grow with the steps."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.testing import LocalJob


def train_long(update):
    """Train 400 steps; return how many requests each bucket remembers."""
    net = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = paceline.DistributedOptimizer(inner, "dist_sync", model=net, update=update)
    for _ in range(400):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    blocks = optimizer.kvstore.table.blocks.values()
    return [len(side.sending) for block in blocks for side in block.buckets]


@pytest.mark.parametrize("update", ["worker", "server"])
def test_answered_requests_are_forgotten(update: str) -> None:
    with LocalJob(1, 1) as job:
        [remembered] = job.run(train_long, update, timeout_s=60)
    assert max(remembered) <= 16
