"""Buffers whose shape a forward pass changes are each worker's own, and training goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.gluon import Trainer, replicate
from paceline.kvstore.base import KVStoreBase
from paceline.mx.context import cpu
from paceline.testing import LocalJob
from tests.hvd.ranks import run as run_ranks

STEPS, START = 4, 4
#: Samples of a batch of each worker. The mask has the start's size as long as batches have.
SIZES = [(START, START + 1), (START + 1, START), (START + 1, START + 2)]
ON_SERVERS: list[tuple[str, dict[str, Any]]] = [
    ("dist_sync", {"update": "worker"}),
    ("dist_sync", {"update": "server"}),
    ("dist_async", {}),
    ("dist_sync", {"local_steps": 2}),
]


class Net(nn.Module):
    """Keeps a mask for the largest batch, a number per pass, and a buffer that its first pass makes."""

    mask: torch.Tensor
    steps: torch.Tensor
    late: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("mask", torch.ones(START))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("late", None)
        self.train()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > len(self.mask):
            self.mask = torch.ones(len(inputs))
        if self.late is None:
            self.late = torch.full((len(inputs),), 2.0)
        if self.training:
            self.steps = torch.cat([self.steps, torch.ones(1)])
        outputs: torch.Tensor = self.last(self.norm(inputs))
        return outputs * self.mask[: len(inputs), None]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("paceline.optim.shared_tensors").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, size: int, step: int) -> torch.Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def found_in(net: Any, lines: Lines) -> list[Any]:
    state = net.state_dict()
    return [
        state["norm.running_mean"].tolist(),
        len(state["mask"]),
        len(state["steps"]),
        len(lines.texts),
        lines.texts[0],
    ]


def train(store: KVStoreBase, size: int, choices: dict[str, Any]) -> list[Any]:
    net, lines = new_net(), Lines()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), store, model=net, **choices)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(store.rank, size, step)).square().mean().backward()
        optimizer.step()
        if store.type == "dist_async":
            store.barrier()  # else worker 0 may not have taken this step yet
        net.eval()(batch(store.rank, size, step))
        net.train()
    return found_in(net, lines)


def train_gluon(store: KVStoreBase, size: int) -> list[Any]:
    net, lines = replicate(new_net(), cpu()), Lines()
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, store)
    for step in range(STEPS):
        net(batch(store.rank, size, step)).square().sum().backward()
        trainer.step(sum(SIZES[0]))
    return found_in(net, lines)


def on_servers(all_sizes: list[list[int]]) -> list[list[Any]]:
    stores = {kind: kvstore.create(kind) for kind in ("dist_sync", "dist_async")}
    rank = stores["dist_sync"].rank
    return [
        [train(stores[kind], sizes[rank], choices) for kind, choices in ON_SERVERS]
        + [train_gluon(stores["dist_sync"], sizes[rank])]
        for sizes in all_sizes
    ]


def without_servers(all_sizes: list[list[int]]) -> list[list[Any]]:
    store = kvstore.create("allreduce")
    return [[train(store, sizes[store.rank], {}), train_gluon(store, sizes[store.rank])] for sizes in all_sizes]


def check(results: list[list[Any]], sizes: tuple[int, int]) -> None:
    for one, other in zip(*results, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-6), "they have rank 0's running means"
        assert [one[1], other[1]] == list(sizes)
        assert [one[2], other[2]] == [1 + STEPS] * 2
        assert [one[3], other[3]] == [1, 1], "each worker says it once"
        assert "each worker's own from now on" in one[4]


def test_they_are_each_workers_own_with_servers() -> None:
    with LocalJob(2, 1) as job:
        for results in zip(SIZES[:2], *job.run(on_servers, SIZES[:2]), strict=True):
            check(list(results[1:]), results[0])


def test_they_are_each_workers_own_with_all_reduce() -> None:
    for results in zip(SIZES, *run_ranks(without_servers, 2, SIZES), strict=True):
        check(list(results[1:]), results[0])
