"""Loops that take a derivative of ``param.grad``, as AdaHessian does: the graph of gradients outlives their merge."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.kvstore.base import KVStoreBase
from paceline.testing import LocalJob
from tests.hvd.ranks import run as run_ranks

STEPS, WORKERS = 4, 2


class Curvature(torch.optim.Optimizer):
    """Divides each gradient by the derivatives of the gradients' sum, which ``merge`` averages over the workers."""

    def __init__(self, net: nn.Module, merge: Any) -> None:
        super().__init__(net.parameters(), {"lr": 0.1})
        self._merge = merge

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        slopes = self._merge(derivatives(params))
        with torch.no_grad():
            for param, slope in zip(params, slopes, strict=True):
                assert param.grad is not None
                param.sub_(param.grad / (slope.abs() + 1.0), alpha=0.1)


def derivatives(params: list[nn.Parameter]) -> list[torch.Tensor]:
    grads = [param.grad for param in params if param.grad is not None]
    return list(torch.autograd.grad(grads, params, [torch.ones_like(one) for one in grads]))


def new_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64) + rank


def loss_of(net: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return net(inputs).square().mean()  # type: ignore[no-any-return]


def weights_of(net: nn.Module) -> list[float]:
    return [value for param in net.parameters() for value in param.flatten().tolist()]


def alone() -> list[float]:
    net = new_net()
    optimizer = Curvature(net, lambda slopes: slopes)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, torch.cat([batch(rank, step) for rank in range(WORKERS)])).backward(create_graph=True)
        optimizer.step()
    return weights_of(net)


def train(store: KVStoreBase, merge: Any) -> list[Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.optim.strategy").addHandler(handler)
    net = new_net()
    optimizer = DistributedOptimizer(Curvature(net, merge), store, model=net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(store.rank, step)).backward(create_graph=True)
        optimizer.step()
    return [weights_of(net), list(lines)]


def through_servers() -> list[Any]:
    store, means = kvstore.create("dist_sync"), kvstore.create("dist_sync", mean=True)
    names = [name for name, _ in new_net().named_parameters()]
    means.init(names, [torch.zeros_like(param) for param in new_net().parameters()])

    def merge(slopes: list[torch.Tensor]) -> list[torch.Tensor]:
        means.pushpull(names, slopes)
        return slopes

    return [*train(store, merge), own_slopes(store)]


def own_slopes(store: KVStoreBase) -> bool:
    """Return whether derivatives are this worker's own where the servers step."""
    net, same = new_net(), new_net()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), store, model=net, update="server")
    for one in (net, same):
        loss_of(one, batch(store.rank, 0)).backward(create_graph=True)
    found, wanted = derivatives(list(net.parameters())), derivatives(list(same.parameters()))
    optimizer.step()
    return all(map(torch.equal, found, wanted))


def without_servers() -> list[Any]:
    store = kvstore.create("allreduce")

    def merge(slopes: list[torch.Tensor]) -> list[torch.Tensor]:
        store.pushpull([str(number) for number in range(len(slopes))], slopes)
        return [one / WORKERS for one in slopes]

    return train(store, merge)


def test_derivatives_that_are_averaged_equal_one_process() -> None:
    wanted = alone()
    with LocalJob(WORKERS, 1) as job:
        results = job.run(through_servers)
    assert [result.pop() for result in results] == [True] * WORKERS
    for found in (results, run_ranks(without_servers, WORKERS)):
        assert found[0][0] == found[1][0]
        assert found[0][0] == pytest.approx(wanted, rel=1e-9)
        assert [len(lines) for _, lines in found] == [1, 0], "worker 0 says it once"
        assert "each worker's own samples" in found[0][1][0]
