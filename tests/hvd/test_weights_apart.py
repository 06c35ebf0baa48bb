"""Weights that one rank alone loads after wrapping: a line of rank 0 names it, without servers and scheduler too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import paceline.hvd as hvd
from tests.hvd.ranks import Ranks

STEPS = 5


def train(way: str, when: int, all_load: bool) -> int:
    """Train for some steps; before one of them rank 0, or every rank, loads weights. Returns the steps."""
    if way != "allreduce":  # there the store joins the job
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
    of_hvd, of_store = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)", "optimizer.broadcast_weights()"
    assert [of_hvd in line, of_store in line] == [way != "allreduce", way == "allreduce"]


@pytest.mark.parametrize("way", ["hvd", "adasum", "allreduce"])
def test_weights_that_all_ranks_load_are_no_news(way: str) -> None:
    assert lines_of(way, 2, True) == []


def steps(model: nn.Module, optimizer: Any, count: int, change: int = -1) -> None:
    """Step; before one of the steps rank 0 alone changes the weights."""
    for step in range(count):
        if step == change and hvd.rank() == 0:
            nn.init.ones_(next(model.parameters()))
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


def wrapped(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **options)


def wrapped_in_another_order(change: int) -> int:
    hvd.init()
    torch.manual_seed(0)
    first, second = nn.Linear(6, 1), nn.Sequential(nn.Linear(6, 1))
    models = [first, second] if hvd.rank() == 0 else [second, first]
    optimizers = {model: wrapped(model) for model in models}
    steps(first, optimizers[first], STEPS, change)
    steps(second, optimizers[second], STEPS)
    hvd.shutdown()
    return STEPS


def one_rank_copies_and_begins_anew(change: int) -> int:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = wrapped(model)
    if hvd.rank() == 0:
        wrapped(nn.Linear(2, 2))
        optimizer = copy.deepcopy(optimizer)
        model = nn.Linear(6, 1)
        model.weight, model.bias = optimizer.param_groups[0]["params"]
    steps(model, optimizer, STEPS)
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 0:
        optimizer = wrapped(model)
    steps(model, optimizer, STEPS, change)
    hvd.shutdown()
    return STEPS


def joined_after_unlike_steps(change: int) -> int:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = wrapped(model)
    for _ in range(3):
        steps(model, optimizer, STEPS + 2 * hvd.rank())
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    steps(model, optimizer, STEPS, change)
    hvd.shutdown()
    return STEPS


def also_of_a_process_set(change: int) -> int:
    """Rank 0 trains another model of the same shape alone, and so does rank 1."""
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets)
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    torch.manual_seed(hvd.rank())
    own = nn.Linear(6, 1)
    of_all, of_this = wrapped(model), wrapped(own, process_set=sets[hvd.rank()])
    for step in range(STEPS):
        steps(own, of_this, 1)
        steps(model, of_all, 1, 0 if step == change else -1)
    hvd.shutdown()
    return STEPS


@pytest.mark.parametrize("change", [-1, 2])
@pytest.mark.parametrize(
    "loop",
    [wrapped_in_another_order, one_rank_copies_and_begins_anew, joined_after_unlike_steps, also_of_a_process_set],
)
def test_ranks_compare_the_same_optimizer_after_the_same_step(loop: Callable[[int], int], change: int) -> None:
    ranks = Ranks(loop, 2, change)
    assert ranks.results() == [STEPS] * 2
    lines = [line for line in ranks.output(0).splitlines() if "other weights" in line]
    assert ["after step 4: parameter" in line for line in lines] == [True] * (change >= 0)
