"""Optimizers that wrap another one and skip torch's constructor: they work, or the error says to wrap the other way."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.errors import ConfigError
from paceline.testing import LocalJob
from tests.hvd.ranks import run as run_ranks

STEPS = 5


class Lookahead(torch.optim.Optimizer):
    """Has no tables of hooks, and keeps the weights of its start."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.defaults, self.steps = optimizer, optimizer.defaults, 0
        self.state = defaultdict(dict)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["base"])

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.steps += 1
        for group in self.param_groups if self.steps % 2 == 0 else ():
            for param in group["params"]:
                self.state[param]["slow"].lerp_(param.detach(), 0.5)
                param.data.copy_(self.state[param]["slow"])
        return loss


class ScheduleFree:
    """Is no optimizer of torch's by its class."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    def step(self) -> None:
        self.base.step()


class WithoutDefaults(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(kind: str, workers: int = 1) -> list[list[float]]:
    """Train with the wrapper inside and outside; returns the weights of each."""
    store = kvstore.create(kind)
    found = []
    for is_inside in (True, False):
        torch.manual_seed(store.rank)
        net = nn.Linear(4, 2)
        sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        calls: list[int] = []
        optimizer: Any
        if is_inside:
            optimizer = DistributedOptimizer(Lookahead(sgd), store, model=net)
            optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        else:
            optimizer = Lookahead(DistributedOptimizer(sgd, store, model=net))
        for step in range(STEPS):
            net.zero_grad()
            ranks = range(workers) if workers > 1 else [store.rank]
            net(torch.cat([batch(rank, step) for rank in ranks])).square().mean().backward()
            optimizer.step()
        assert len(calls) == is_inside * STEPS
        optimizer.load_state_dict(optimizer.state_dict())
        found.append([*net.weight.flatten().tolist(), *net.bias.tolist()])
    return found


def test_optimizer_that_keeps_the_weights_of_its_start_trains_as_in_one_process() -> None:
    [expected, same] = train("local", workers=2)
    assert same == expected
    with LocalJob(2, 1) as job:
        found = job.run(train, "dist_sync")
    found += run_ranks(train, 2, "allreduce")
    assert all(weights == pytest.approx(expected, abs=1e-6) for one in found for weights in one)


def begin(kind: str) -> str:
    """Begin with a state that only rank 0 has loaded; returns the error."""
    store = kvstore.create(kind)
    net = nn.Linear(4, 2)
    inner = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if store.rank == 0:
        net(batch(0, 0)).sum().backward()
        inner.step()
    with pytest.raises(ConfigError) as caught:
        DistributedOptimizer(inner, store, model=net)
    return str(caught.value)


def test_state_that_one_worker_has_loaded_is_an_error_with_all_reduce() -> None:
    said = run_ranks(begin, 2, "allreduce")
    assert [one.split(":")[0] for one in said] == ["worker 0", "worker 1"]
    assert ["here it has 2 tensors" in said[0], "here it has 0 tensors" in said[1]] == [True, True]


@pytest.mark.parametrize("kind", [ScheduleFree, WithoutDefaults])
def test_error_about_a_wrapper_names_the_other_way_round(kind: Any) -> None:
    wrapper = kind(torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1))
    with pytest.raises(TypeError, match=rf"{kind.__name__}.* other way round: {kind.__name__}\(DistributedOptimizer"):
        DistributedOptimizer(wrapper, "local")


def test_error_about_something_else_does_not() -> None:
    with pytest.raises(TypeError, match=r"^Linear is not a torch.optim.Optimizer$"):
        DistributedOptimizer(nn.Linear(2, 1), "local")  # type: ignore[arg-type]
