"""Weights that one rank alone loads after wrapping: a line of rank 0 names it, without servers and scheduler too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
import paceline.hvd as hvd
from tests.hvd.ranks import Ranks

STEPS = 5


def train(way: str, when: int, all_load: bool) -> int:
    """Train for some steps; before one of them rank 0, or every rank, loads weights. Returns the steps."""
    hvd.init()
    torch.manual_seed(0)
    model, loaded = nn.Linear(6, 1), nn.Linear(6, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = (
        paceline.DistributedOptimizer(inner, "allreduce", model=model, samples=4)
        if way == "allreduce"
        else hvd.DistributedOptimizer(inner, op=hvd.Adasum if way == "adasum" else hvd.Average)
    )
    torch.manual_seed(hvd.rank())
    for step in range(STEPS):
        if step == when and (all_load or hvd.rank() == 0):
            model.load_state_dict(loaded.state_dict())
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    hvd.shutdown()
    return STEPS


def lines_of(way: str, when: int, all_load: bool) -> list[str]:
    ranks = Ranks(train, 2, way, when, all_load)
    assert ranks.results() == [STEPS] * 2
    assert "other weights" not in ranks.output(1)
    return [line for line in ranks.output(0).splitlines() if "other weights" in line]


@pytest.mark.parametrize("way", ["hvd", "adasum", "allreduce"])
def test_weights_that_rank_0_alone_loads_after_wrapping_are_named(way: str) -> None:
    [line] = lines_of(way, 2, False)
    assert "worker 1 has other weights than worker 0 after step 4: parameter" in line
    assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in line
    assert "optimizer.broadcast_weights()" in line


@pytest.mark.parametrize("way", ["hvd", "adasum", "allreduce"])
def test_weights_that_all_ranks_load_are_no_news(way: str) -> None:
    assert lines_of(way, 2, True) == []
