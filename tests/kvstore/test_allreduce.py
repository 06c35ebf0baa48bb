"""The store without servers: sums of all workers, by all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import cpu
from paceline.errors import PacelineError
from paceline.gluon import Trainer, replicate
from paceline.mx.module import Module
from tests.hvd.ranks import Ranks, run


def sums(kind: str) -> list[Any]:
    store = paceline.kvstore.create(kind)
    rank = store.rank
    out = torch.zeros(3)
    store.broadcast("w", torch.full((3,), float(rank + 5)), out)
    values = [torch.full((2,), float(rank + 1)), torch.full((2,), 10.0)]  # of two devices
    store.pushpull("g", values)
    keyed = [torch.full((2, 2), float(rank)), torch.full((4,), rank)]
    store.pushpull(["one", "two"], keyed, out=keyed)
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


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
STEPS = 20


def weights_of(model: nn.Module) -> list[float]:
    return [value for one in model.state_dict().values() for value in one.flatten().tolist()]


def by_trainer(name: str, kind: str, devices: int) -> list[float]:
    store = paceline.kvstore.create(kind)
    net = replicate(network(store.rank), [cpu(number) for number in range(devices)])
    trainer = Trainer(net, name, OPTIMIZERS[name][1], store)
    mine = slice(4 * store.rank, 4 * store.rank + 4)
    for step in range(STEPS):
        x, y = (whole[mine].chunk(devices) for whole in batch(step))
        for replica, data, label in zip(net.replicas, x, y, strict=True):
            nn.functional.cross_entropy(replica(data), label, reduction="sum").backward()
        trainer.step(8)
    return weights_of(net)


def by_module(name: str, kind: str, devices: int) -> list[float]:
    store = paceline.kvstore.create(kind)
    module = Module(network(store.rank), [cpu(number) for number in range(devices)])
    mine = slice(4 * store.rank, 4 * store.rank + 4)
    batches = [(x[mine], y[mine]) for x, y in map(batch, range(STEPS))]
    module.fit(batches, kvstore=store, optimizer=name, optimizer_params=OPTIMIZERS[name][1])
    return weights_of(module.net)


def by_optimizer(name: str, kind: str, passes: int) -> list[float]:
    store = paceline.kvstore.create(kind)
    model = network(store.rank)
    cls, options = OPTIMIZERS[name]
    inner = cls(model.parameters(), **options)
    optimizer = paceline.DistributedOptimizer(inner, store, model=model, backward_passes_per_step=passes)
    rows = 4 // passes
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        for number in range(passes):
            mine = slice(4 * store.rank + number * rows, 4 * store.rank + (number + 1) * rows)
            (nn.functional.cross_entropy(model(x[mine]), y[mine]) / passes).backward()
        optimizer.step()
    return weights_of(model)


def fronts() -> dict[str, list[float]]:
    """Train by every front on a part of each batch; returns the weights."""
    found = {}
    for name in OPTIMIZERS:
        for kind, number in (("horovod", 1), ("allreduce", 2)):
            for front in (by_trainer, by_module, by_optimizer):
                found[f"{name} {front.__name__} {kind} {number}"] = front(name, kind, number)
    return found


def alone(name: str) -> list[float]:
    model = network(0)
    cls, options = OPTIMIZERS[name]
    optimizer = cls(model.parameters(), **options)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights_of(model)


def test_training_by_every_front_equals_one_process() -> None:
    first, second = run(fronts, 2)
    assert first == second
    for case, found in first.items():
        assert found == pytest.approx(alone(case.split()[0]), abs=1e-5), case


class Normal(nn.Module):
    """A network with buffers, and a parameter that no optimizer has."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.body = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.full((6,), float(rank + 1)), requires_grad=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x) * self.scale))


#: Of the 8 samples of a batch, the first worker takes this many.
FIRST = 6


def unequal_parts(given: bool) -> list[float]:
    store = paceline.kvstore.create("allreduce")
    mine = slice(0, FIRST) if store.rank == 0 else slice(FIRST, 8)
    model = network(store.rank)
    optimizer = paceline.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        store,
        model=None if given else model,
        batch_dim=None if given else 0,
    )
    for step in range(STEPS):
        x, y = (whole[mine] for whole in batch(step))
        optimizer.samples = len(x) if given else None
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights_of(model)


def closures() -> tuple[list[float], list[float]]:
    store = paceline.kvstore.create("allreduce")
    mine = slice(0, FIRST) if store.rank == 0 else slice(FIRST, 8)
    model = network(store.rank).double()
    inner = torch.optim.LBFGS(model.parameters(), max_iter=4)
    optimizer = paceline.DistributedOptimizer(inner, store, model=model, batch_dim=0)
    losses = by_closures(model, optimizer, mine)
    return weights_of(model), losses


def by_closures(model: nn.Module, optimizer: torch.optim.Optimizer, mine: slice) -> list[float]:
    losses = []
    for step in range(5):
        x, y = (whole[mine] for whole in batch(step))
        x = x.double()  # L-BFGS makes differences of rounding a hundred times larger

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def with_buffers() -> dict[str, list[float]]:
    store = paceline.kvstore.create("allreduce")
    model = Normal(store.rank)
    params = [one for one in model.parameters() if one.requires_grad]
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), store, model=model)
    for step in range(3):
        x, y = (whole[4 * store.rank : 4 * store.rank + 4] for whole in batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.head.weight.data.add_(store.rank)
    optimizer.broadcast_weights()
    return {name: one.flatten().tolist() for name, one in model.state_dict().items()}


def some_without_gradients(store: Any, mine: slice) -> list[float]:
    """One layer is frozen after two steps. Another one is used in every second step, and then by worker 0 alone."""
    model, extra = network(0), nn.Linear(3, 3)
    nn.init.eye_(extra.weight)
    params = [*model.parameters(), *extra.parameters()]
    inner = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer = inner if store is None else paceline.DistributedOptimizer(inner, store)
    for step in range(6):
        model[0].requires_grad_(step < 2)
        optimizer.zero_grad()
        x, y = (whole[mine] for whole in batch(step))
        loss = nn.functional.cross_entropy(model(x), y)
        if step % 2 and (store is None or store.rank == 0):
            loss = loss + (1 if store is None else 2) * extra(torch.ones(1, 3)).square().mean()
        loss.backward()
        optimizer.step()
    return weights_of(model) + weights_of(extra)


def frozen() -> list[float]:
    store = paceline.kvstore.create("allreduce")
    return some_without_gradients(store, slice(4 * store.rank, 4 * store.rank + 4))


def uneven() -> list[Any]:
    return [unequal_parts(given=True), unequal_parts(given=False), closures(), with_buffers(), frozen()]


def test_unequal_batches_closures_and_buffers_equal_one_process() -> None:
    first, second = run(uneven, 2)
    assert first == second
    given, counted, (by_lbfgs, losses), state, partly = first
    assert given == pytest.approx(alone("sgd"), abs=1e-5)
    assert counted == pytest.approx(alone("sgd"), abs=1e-5)
    model = network(0).double()
    wanted = by_closures(model, torch.optim.LBFGS(model.parameters(), max_iter=4), slice(None))
    assert losses == pytest.approx(wanted, abs=1e-9)
    assert by_lbfgs == pytest.approx(weights_of(model), abs=1e-6)
    assert state["scale"] == [1.0] * 6
    assert state["norm.num_batches_tracked"] == [3]
    assert partly == pytest.approx(some_without_gradients(None, slice(None)), abs=1e-5)


def one_ends() -> str:
    store = paceline.kvstore.create("allreduce")
    store.barrier()
    if store.rank == 1:
        return ""
    try:
        store.pushpull("never", torch.zeros(1))
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_error_speaks_of_the_store_where_a_worker_has_ended() -> None:
    found, _ = run(one_ends, 2)
    assert "The all-reduce store has been shut down by rank 1: the process of rank 1" in found
    assert "start all workers again" in found
    assert not {word for word in ("hvd", "Horovod") if word in found}


def nobody_else() -> str:
    try:
        paceline.kvstore.create("allreduce")
    except PacelineError as error:
        return str(error)
    return ""


def test_error_names_the_store_where_the_others_do_not_make_it() -> None:
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HOROVOD_START_TIMEOUT": "0.5"}
    [found] = Ranks(nobody_else, 1, environment=environment).results()
    assert found.startswith('rank 0: rank 1 of 2 did not call kvstore.create("allreduce") within 0.5 s')
