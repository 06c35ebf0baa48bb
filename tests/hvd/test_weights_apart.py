"""Weights that one rank alone loads after wrapping: a line of rank 0 names it, without servers and scheduler too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import paceline.hvd as hvd
from tests.hvd.ranks import started_in_turn

STEPS = 5
WAYS = ("hvd", "adasum", "allreduce")
CHANGES = (-1, 2)


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
    return STEPS


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_rank_0_alone_loads_after_wrapping_are_named(way: str, lines: dict[str, list[str]]) -> None:
    [line] = lines[f"train {way} 2 False"]
    assert "worker 1 has other weights than worker 0 after step 4: parameter" in line
    of_hvd, of_store = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)", "optimizer.broadcast_weights()"
    assert [of_hvd in line, of_store in line] == [way != "allreduce", way == "allreduce"]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_all_ranks_load_are_no_news(way: str, lines: dict[str, list[str]]) -> None:
    assert lines[f"train {way} 2 True"] == []


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
    return STEPS


LOOPS = (wrapped_in_another_order, one_rank_copies_and_begins_anew, joined_after_unlike_steps, also_of_a_process_set)


@pytest.fixture(scope="module")
def lines() -> dict[str, list[str]]:
    """The lines of rank 0 about weights, by loop and arguments."""
    calls = [(train, way, 2, all_load) for way in WAYS for all_load in (False, True)]
    ranks, names = started_in_turn(2, *calls, *((loop, change) for loop in LOOPS for change in CHANGES))
    assert ranks.results() == [[STEPS] * len(names)] * 2
    assert "other weights" not in ranks.output(1)
    found: dict[str, list[str]] = {}
    for line in ranks.output(0).splitlines():
        if line in names:
            found[name := line] = []
        elif "other weights" in line:
            found[name].append(line)
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("loop", [loop.__name__ for loop in LOOPS])
def test_ranks_compare_the_same_optimizer_after_the_same_step(
    loop: str, change: int, lines: dict[str, list[str]]
) -> None:
    found = lines[f"{loop} {change}"]
    assert ["after step 4: parameter" in line for line in found] == [True] * (change >= 0)
