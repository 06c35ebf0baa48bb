"""Buffers of a trainer's network, and its parameters that no trainer has, are rank 0's on all workers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import kvstore
from paceline.errors import KeyMismatchError
from paceline.gluon import Trainer, replicate
from paceline.mx.context import cpu
from paceline.testing import LocalJob


class Net(nn.Module):
    """Has running means, and fixed buffers and parameters that each worker draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.rest = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("turns", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("places", torch.randperm(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest((self.norm(self.first(x)) * self.turns).real[:, self.places])


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def states(kind: str, devices: int) -> list[dict[str, list[float]]]:
    """Train parts of networks; return what this worker evaluates with."""
    store = kvstore.create(kind)
    torch.manual_seed(store.rank)
    found = []
    for net, select in ((Net(), "first|norm"), (lazy(), "0"), (lazy(), "2")):
        replicated = replicate(net, [cpu(number) for number in range(devices)])
        trainer = Trainer(replicated.collect_params(select), "sgd", {"lr": 0.1}, store)
        for _ in range(3):
            outputs = replicated([torch.randn(5, 3) for _ in range(devices)])
            replicated.backward([one.square().sum() for one in outputs])
            trainer.step(5 * devices)
        kvstore.create(kind).barrier()
        replicated.eval()
        state = replicated.state_dict().items()
        found.append({name: torch.view_as_real(one.to(torch.complex128)).flatten().tolist() for name, one in state})
    return found


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", ["dist_sync", "allreduce"])
def test_all_workers_evaluate_with_what_worker_0_has(kind: str, devices: int) -> None:
    with LocalJob(2, 1) as job:
        first, other = job.run(states, kind, devices)
    assert first == other
    assert any(first[0]["turns"][1::2]), "the imaginary parts are lost"


def loaded() -> list[list[float]]:
    """Train, load the state of the start, and evaluate; return the means before and after."""
    store = kvstore.create("dist_sync")
    torch.manual_seed(store.rank)
    net = replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), cpu())
    trainer = Trainer(net, "sgd", {"lr": 0.1}, store, update_on_kvstore=False)
    first = {name: one.clone() for name, one in net.state_dict().items()}
    for _ in range(3):
        net(torch.randn(5, 3)).square().sum().backward()
        trainer.step(5)
    net.load_state_dict(first)
    net.eval()
    return [one.tolist() for one in (first["1.running_mean"], net.replicas[0][1].running_mean)]


def test_loaded_buffers_stay() -> None:
    with LocalJob(2, 1) as job:
        for before, after in job.run(loaded):
            assert after == before


def other_buffers() -> str:
    store = kvstore.create("dist_sync")
    net = nn.Linear(3, 4)
    if store.rank:
        net.register_buffer("mask", torch.ones(4))
    with pytest.raises(KeyMismatchError) as caught:
        Trainer(replicate(net, cpu()), "sgd", {"lr": 0.1}, store)
    return str(caught.value)


def test_workers_with_unlike_buffers_are_told_so() -> None:
    with LocalJob(2, 1) as job:
        assert all("buffer 'mask'" in text for text in job.run(other_buffers))
