"""The store without servers: sums of all workers, by all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import cpu
from paceline.gluon import Trainer, replicate
from tests.hvd.ranks import run


def sums(kind: str) -> list[Any]:
    store = paceline.kvstore.create(kind)
    rank = store.rank
    out = torch.zeros(3)
    store.broadcast("w", torch.full((3,), float(rank + 5)), out)
    values = [torch.full((2,), float(rank + 1)), torch.full((2,), 10.0)]  # of two devices
    store.pushpull("g", values)
    keyed = [torch.full((2, 2), float(rank)), torch.full((4,), rank)]
    store.pushpull([1, "two"], keyed, out=keyed)
    store.barrier()
    return [
        store.type, store.num_workers, store.is_capable("optimizer"), out.tolist(),
        values[0].tolist(), values[1].tolist(), keyed[0].sum().item(), keyed[1].tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["horovod", "AllReduce"])
def test_values_of_all_devices_and_workers_are_summed(kind: str) -> None:
    wanted = [kind.lower(), 2, False, [5.0] * 3, [23.0] * 2, [23.0] * 2, 4.0, [1] * 4]
    assert run(sums, 2, kind) == [wanted] * 2


def test_it_has_no_options() -> None:
    with pytest.raises(TypeError, match="staleness"):
        paceline.kvstore.create("allreduce", staleness=3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def network(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def train(front: str) -> list[float]:
    store = paceline.kvstore.create("horovod")
    rank, model = store.rank, network(store.rank)
    mine = slice(4 * rank, 4 * rank + 4)
    if front == "trainer":
        net = replicate(model, cpu(0))
        trainer = Trainer(net, "sgd", {"lr": 0.1}, store)
        for step in range(10):
            x, y = batch(step)
            nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum").backward()
            trainer.step(8)
        return [value for one in net.collect_params().values() for value in one.data().flatten().tolist()]
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = paceline.DistributedOptimizer(inner, store, model=model)
    for step in range(10):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return [value for param in model.parameters() for value in param.flatten().tolist()]


@pytest.mark.parametrize("front", ["trainer", "optimizer"])
def test_training_equals_one_process(front: str) -> None:
    first, second = run(train, 2, front)
    assert first == second
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(10):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    alone = [value for param in model.parameters() for value in param.flatten().tolist()]
    assert first == pytest.approx(alone, abs=1e-5)
