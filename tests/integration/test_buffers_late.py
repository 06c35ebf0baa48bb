"""A worker that reads late, when worker 0 has published the buffers of its next step, reads those of its own step."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.gluon import Trainer, replicate
from paceline.kvstore.base import KVStoreBase
from paceline.mx.context import cpu
from paceline.optim.buffers import Buffers
from paceline.optim.publications import Publication
from paceline.testing import LocalJob
from tests.hvd.ranks import run as run_ranks

STEPS, WORKERS = 5, 2
PROBE = torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3)


class Net(nn.Module):
    """Trains a normalisation, beside a frozen one and two factors.

    Each forward pass of training reads one and changes it; the other one is changed by the loop, after each step.
    """

    def __init__(self, has_frozen: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.frozen = nn.BatchNorm1d(4) if has_frozen else nn.Identity()
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("annealed", torch.ones(()))
        self.train()

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.factor.mul_(1.5)
        return self.last(self.frozen(self.norm(self.first(inputs)).tanh()) * self.factor) * self.annealed


def new_net(has_frozen: bool) -> Net:
    torch.manual_seed(0)
    return Net(has_frozen).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64) + rank


def seen_of(net: nn.Module) -> list[list[float]]:
    """Return what evaluation, a copy and the state show: outputs, and running means."""
    with torch.no_grad():
        outputs = net.eval()(PROBE)
    copied = copy.deepcopy(net).norm.running_mean
    found = [outputs.flatten(), copied, net.state_dict()["norm.running_mean"]]
    net.train()
    return [one.tolist() for one in found]


def alone(has_frozen: bool) -> list[Any]:
    """One process that computes each worker's part by itself; only worker 0's part changes the buffers."""
    net = new_net(has_frozen)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        before, after = copy.deepcopy(dict(net.named_buffers())), {}
        for rank in range(WORKERS):
            for name, one in net.named_buffers():
                one.copy_(before[name])
            net(batch(rank, step)).square().mean().div(WORKERS).backward()
            after = after or copy.deepcopy(dict(net.named_buffers()))
        for name, one in net.named_buffers():
            one.copy_(after[name])
        optimizer.step()
        net.annealed.mul_(0.9)
        found.append([] if has_frozen else seen_of(net))
    return [*found, [net.last.weight.flatten().tolist()]]


class Lead:
    """Lets worker 1 wait, before it reads, until the servers have the buffers of worker 0's next step."""

    def __init__(self, pipe: str, rank: int) -> None:
        self._fd, self._rank = os.open(pipe, os.O_RDWR), rank
        if rank == 0:
            publish = Buffers.publish

            def publish_and_tell(buffers: Buffers) -> Publication | None:
                sent = publish(buffers)
                assert sent is not None
                sent.wait()
                os.write(self._fd, b".")
                return sent

            Buffers.publish = publish_and_tell  # type: ignore[method-assign]

    def after(self, step: int) -> None:
        """Wait after a step of worker 1."""
        if self._rank == 1:
            for _ in range((step == 0) + (step < STEPS - 1)):
                assert os.read(self._fd, 1)


def train(store: KVStoreBase, after_step: Callable[[int], None], has_frozen: bool, **choices: Any) -> list[Any]:
    """Train; return what each step shows."""
    net = new_net(has_frozen)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), store, model=net, **choices)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(store.rank, step)).square().mean().backward()
        optimizer.step()
        after_step(step)
        net.annealed.mul_(0.9)
        found.append([] if has_frozen else seen_of(net))
    return [*found, [net.last.weight.flatten().tolist()]]


def train_gluon(store: KVStoreBase, after_step: Callable[[int], None], on_servers: bool) -> list[Any]:
    net = replicate(new_net(has_frozen=False), cpu())
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, store, update_on_kvstore=on_servers)
    found = []
    for step in range(STEPS):
        net(batch(store.rank, step)).square().mean().backward()
        trainer.step(WORKERS)
        after_step(step)
        net.replicas[0].annealed.mul_(0.9)  # type: ignore[operator, union-attr]
        found.append([net.state_dict()["norm.running_mean"].tolist()])
    return found


CHOICES: list[dict[str, Any]] = [{"update": "worker"}, {"update": "server"}]


def train_late(pipe: str) -> list[list[Any]]:
    """Train in several ways, one after the other."""
    store = kvstore.create("dist_sync")
    after_step = Lead(pipe, store.rank).after
    found = [train(store, after_step, has_frozen, **choices) for has_frozen in (False, True) for choices in CHOICES]
    return found + [train_gluon(store, after_step, on_servers) for on_servers in (False, True)]


def test_late_worker_reads_the_buffers_of_its_own_step(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    evaluating, beside_frozen = alone(has_frozen=False), alone(has_frozen=True)
    wanted = [evaluating] * len(CHOICES) + [beside_frozen] * len(CHOICES)
    wanted += 2 * [[step[2:] for step in evaluating[:-1]]]
    with LocalJob(WORKERS, 1) as job:
        for found in job.run(train_late, str(tmp_path / "pipe")):
            for number, one in enumerate(found):
                check(one, wanted[number])


def train_reduced(has_frozen: bool) -> list[Any]:
    return train(kvstore.create("allreduce"), lambda step: None, has_frozen)


@pytest.mark.parametrize("has_frozen", [False, True], ids=["evaluates", "beside frozen"])
def test_all_reduce_reads_the_buffers_of_the_step(has_frozen: bool) -> None:
    for found in run_ranks(train_reduced, WORKERS, has_frozen):
        check(found, alone(has_frozen))


def check(found: list[Any], wanted: list[Any]) -> None:
    for one, right in zip(found, wanted, strict=True):
        for values, others in zip(one, right, strict=True):
            torch.testing.assert_close(torch.tensor(values), torch.tensor(others))
