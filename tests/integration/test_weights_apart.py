"""Weights that one worker alone loads or changes after wrapping: a line names it, whatever the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.errors import ConfigError
from paceline.testing import LocalJob


def checkpoint() -> nn.Module:
    torch.manual_seed(7)
    return net()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))


def load(model: nn.Module) -> None:
    model.load_state_dict(checkpoint().state_dict())


def copy_data(model: nn.Module) -> None:
    loaded = dict(checkpoint().named_parameters())
    for name, param in model.named_parameters():
        param.data.copy_(loaded[name])


def initialise(model: nn.Module) -> None:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


def nothing(model: nn.Module) -> None:
    """As it should be."""


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "state_dict": load, "data": copy_data, "seed": initialise, "never": nothing,
}  # fmt: skip


def train(way: str, update: str, when: int, on_all: bool = False, backbone: bool = False) -> int:
    """Train for some steps; before one of them, rank 0 changes weights. Returns the steps that were made."""
    store = kvstore.create("dist_sync")
    torch.manual_seed(store.rank)
    model = net()
    trained = model[2] if backbone else model  # type: ignore[index]
    inner = torch.optim.SGD(trained.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(inner, store, model=model, update=update, samples=4)  # type: ignore[arg-type]
    for step in range(5):
        if step == when and (on_all or store.rank == 0):
            WAYS[way](model[0:1] if backbone else model)  # type: ignore[index]
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    store.barrier()
    return optimizer.round


def said(job: LocalJob) -> list[str]:
    return [line for line in job.scheduler.output.splitlines() if "other weights" in line]


def lines_of(*args: object, workers: int = 2) -> list[str]:
    with LocalJob(workers, 1) as job:
        assert job.run(train, *args) == [5] * workers
        return said(job)


def test_weights_that_rank_0_alone_loads_after_wrapping_are_named() -> None:
    lines = lines_of("state_dict", "worker", 0, workers=3)
    assert len(lines) == 1, lines
    line = lines[0]
    assert "worker 0 has other weights than workers 1-2 after step 1: parameter '0.weight'" in line
    assert "optimizer.broadcast_weights()" in line


def test_weights_that_are_written_through_data_in_the_middle_are_named() -> None:
    [line] = lines_of("data", "worker", 2)
    assert "worker 1 has other weights than worker 0 after step 4" in line


def test_another_seed_on_each_worker_after_wrapping_is_named() -> None:
    assert len(lines_of("seed", "worker", 0, True)) == 1


def test_frozen_layers_that_rank_0_alone_loads_are_named_also_where_servers_step() -> None:
    [line] = lines_of("data", "server", 0, False, True)
    assert "parameter '0.weight'" in line


def test_weights_that_all_workers_load_and_untouched_ones_are_no_news() -> None:
    assert lines_of("state_dict", "worker", 0, True) == []
    assert lines_of("never", "worker", 9) == []


def by_own_rate(kind: str, update: str | None) -> str:
    """Let a worker alone change its learning rate; returns the error of the first step in which they differ."""
    store = kvstore.create(kind)
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = DistributedOptimizer(inner, store, model=model, samples=4, update=update)
    for step in range(4):
        optimizer.zero_grad()
        try:
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
        except ConfigError as error:
            return f"step {step}: {error}"
        optimizer.param_groups[0]["lr"] = 0.5 - 0.25 * (step == 1 and store.rank == 1)
    return "no error"


@pytest.mark.parametrize(("kind", "update"), [("dist_sync", None), ("dist_sync", "server"), ("allreduce", None)])
def test_learning_rates_that_are_not_the_same_are_an_error_in_the_step(kind: str, update: str | None) -> None:
    with LocalJob(2, 1) as job:
        for error in job.run(by_own_rate, kind, update):
            assert error.startswith("step 2: ")
            assert "lr of param group 0 is 0.5 on worker 0 and 0.25 on worker 1" in error
            assert "set the same options on every worker before the same step" in error
