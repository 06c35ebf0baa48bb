"""Loops with ``Trainer`` and ``Module``: as one process with the joined batch, or an error with the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import kvstore, mx
from paceline.errors import PacelineError
from paceline.gluon import Trainer, backward, replicate, split_and_load
from paceline.mx.module import Module
from paceline.testing import LocalJob

STEPS = 6
RATE = {"learning_rate": 0.1}
MOMENTUM = RATE | {"momentum": 0.9}
#: Samples of both workers, in turn.
PARTS = [[5, 3], [2, 6], [4, 4]]


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=chance), torch.randint(3, (8,), generator=chance)


def my_part(rank: int, step: int) -> tuple[torch.Tensor, ...]:
    return tuple(one.split(PARTS[step % len(PARTS)])[rank] for one in batch(step))


def alone(options: dict[str, float], change: Callable[[nn.Module, int], None] = lambda net, step: None) -> nn.Module:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=options["learning_rate"], momentum=options.get("momentum", 0.0))
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        change(net, step)
    return net


def apart(replicas: Any, reference: nn.Module) -> float:
    pairs = [pair for net in replicas for pair in zip(net.parameters(), reference.parameters(), strict=True)]
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def goes_backward(net: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    parts = zip(net(split_and_load(x, net.contexts)), split_and_load(y, net.contexts), strict=True)
    backward([cross_entropy(output, label, reduction="sum") for output, label in parts])


# ---- batches of unlike size -----------------------------------------------------------------------------------------


def by_module(kind: str, how: str) -> float:
    options = {"mean": True} if how == "a store that merges to the mean" else {}
    store: Any = kind if how == "its name" else kvstore.create(kind, **options)
    module = Module(mlp())
    rank = kvstore.create(kind).rank
    parts = [my_part(rank, step) for step in range(STEPS)]
    module.fit(parts, kvstore=store, optimizer_params=RATE, eval_metric=())
    return apart(module.net.replicas, alone(RATE))


MODULES = [
    ("dist_sync", "a store"), ("dist_sync", "its name"), ("dist_sync", "a store that merges to the mean"),
    ("allreduce", "a store"), ("allreduce", "its name"),
]  # fmt: skip


def all_by_module() -> list[float]:
    return [by_module(*one) for one in MODULES]


def test_module_trains_on_unlike_batches_as_one_process_does() -> None:
    with LocalJob(2, 1) as job:
        for found in job.run(all_by_module):
            assert dict(zip(MODULES, found, strict=True)) == pytest.approx(dict.fromkeys(MODULES, 0.0), abs=1e-6)


def by_trainer(kind: str, in_halves: bool) -> list[float]:
    store = kvstore.create(kind)
    net = replicate(mlp(), [mx.cpu(0)])
    trainer = Trainer(net, "sgd", RATE, store, update_on_kvstore=False)
    for step in range(STEPS):
        x, y = my_part(store.rank, step)
        goes_backward(net, x, y)
        if in_halves:
            trainer.allreduce_grads()
            trainer.update(2 * len(x))
        else:
            trainer.step(2 * len(x))
    kvstore.create(kind).barrier()
    return [float(one.detach().sum()) for one in net.replicas[0].parameters()]


@pytest.mark.parametrize("kind", ["dist_sync", "allreduce"])
def test_trainer_that_divides_by_own_batches_keeps_workers_together_or_a_line_says_that_it_cannot(kind: str) -> None:
    with LocalJob(2, 1) as job:
        one, other = job.run(by_trainer, kind, False)
        assert one == other
        assert "other weights" not in job.scheduler.output + job.report()
    with LocalJob(2, 1) as job:
        one, other = job.run(by_trainer, kind, True)
        assert one != other
        said = job.report()
        assert "worker 1 has other weights than worker 0 after step 1: parameter '0.weight'" in said
        assert "the batch size of Trainer.update" in said


# ---- values that are written in place where a store holds them ------------------------------------------------------


def clamped(net: nn.Module) -> None:
    for param in net.parameters():
        param.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def halved(net: nn.Module) -> None:
    for param in net.parameters():
        param.mul_(0.5)


def written(kind: str, change: Callable[[nn.Module], None], taken: bool) -> float:
    store = kvstore.create(kind)
    net = replicate(mlp(), [mx.cpu(0), mx.cpu(1)])
    trainer = Trainer(net, "sgd", MOMENTUM, store)
    for step in range(STEPS):
        x, y = (one.chunk(store.num_workers)[store.rank] for one in batch(step))
        goes_backward(net, x, y)
        trainer.step(8)
        if step == 3:
            for replica in net.replicas:
                change(replica)
            if taken:
                trainer.take_weights()
    assert trainer.update_on_kvstore
    return apart(net.replicas, alone(MOMENTUM, lambda one, step: change(one) if step == 3 else None))


def written_on_servers() -> list[Any]:
    found: list[Any] = [written("dist_sync", change, True) for change in (clamped, halved)]
    for change in (clamped, halved):
        try:
            found.append(written("dist_sync", change, False))
        except PacelineError as error:
            found.append(str(error))
    return found


def test_values_written_in_place_reach_the_servers_or_are_an_error() -> None:
    with LocalJob(2, 1) as job:
        for *taken, one, other in job.run(written_on_servers):
            assert taken == pytest.approx([0.0, 0.0], abs=1e-6)
            for said in (one, other):
                assert said.startswith("parameter '0.weight' was changed after the last step")
                assert "trainer.take_weights() on every worker" in said


@pytest.mark.parametrize("change", [clamped, halved])
@pytest.mark.parametrize("kind", ["local", "device"])
def test_values_written_in_place_reach_a_store_of_one_process_or_are_an_error(
    kind: str, change: Callable[[nn.Module], None]
) -> None:
    assert written(kind, change, True) < 1e-6
    with pytest.raises(PacelineError, match=r"'0\.weight' was changed .* call trainer\.take_weights\(\)"):
        written(kind, change, False)


def test_values_that_are_changed_and_restored_before_the_step_are_no_error() -> None:
    net = replicate(mlp(), [mx.cpu(0), mx.cpu(1)])
    trainer = Trainer(net, "sgd", MOMENTUM, "local")
    for step in range(STEPS):
        goes_backward(net, *batch(step))
        trainer.step(8)
        for replica in net.replicas:
            kept = copy.deepcopy(replica.state_dict())
            halved(replica)
            replica.load_state_dict(kept)
    assert apart(net.replicas, alone(MOMENTUM)) < 1e-6


@pytest.mark.parametrize("index", [0, 7, 11])
def test_one_parameter_of_many_that_is_written_after_each_step_is_an_error_soon(index: int) -> None:
    net = replicate(nn.Sequential(nn.Linear(6, 3), *[nn.Linear(3, 3) for _ in range(5)]), [mx.cpu(0), mx.cpu(1)])
    trainer = Trainer(net, "sgd", RATE, "local")
    written = list(net.replicas[1].parameters())[index]

    def train() -> None:
        for step in range(4):
            goes_backward(net, *batch(step))
            trainer.step(8)
            written.data.mul_(0.5)

    with pytest.raises(PacelineError, match=rf"'{index // 2}\.(weight|bias)' was changed after the last step"):
        train()


@torch.no_grad()
def cut_to_other_memory(net: nn.Module, step: int) -> None:
    for param in net.parameters():
        param.data = param.data.clamp(-0.1, 0.1)


def doubled(net: nn.Module, step: int) -> None:
    if step == 2:
        net.double()


GIVEN: dict[str, Callable[[nn.Module, int], None]] = {"cut": cut_to_other_memory, "doubled": doubled}


def test_weights_that_a_script_gives_other_memory_are_trained_on() -> None:
    assert max(given_in_all_ways(None)) < 1e-6
    with LocalJob(2, 1) as job:
        for found in job.run(given_in_all_ways, "dist_sync"):
            assert max(found) < 1e-6


def given_in_all_ways(kind: str | None) -> list[float]:
    return [given_other_memory(kind, change) for change in GIVEN]


def given_other_memory(kind: str | None, change: str) -> float:
    store = None if kind is None else kvstore.create(kind)
    net = replicate(mlp(), [mx.cpu(0)])
    trainer = Trainer(net, "sgd", MOMENTUM, store, update_on_kvstore=False)
    for step in range(STEPS):
        x, y = batch(step) if store is None else (one.chunk(2)[store.rank] for one in batch(step))
        goes_backward(net, x.to(net.collect_params()["0.weight"].data().dtype), y)
        trainer.step(8)
        GIVEN[change](net.replicas[0], step)
    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        cross_entropy(reference(x.to(next(reference.parameters()).dtype)), y).backward()
        optimizer.step()
        GIVEN[change](reference, step)
    return apart(net.replicas, reference)


def test_written_values_count_where_the_optimizer_has_a_float32_copy_of_them() -> None:
    net = replicate(mlp().bfloat16(), [mx.cpu(0)])
    trainer = Trainer(net, "sgd", {"learning_rate": 2.0**-12, "multi_precision": True}, None)
    param = net.replicas[0].get_parameter("0.bias")
    for written in (0.25, 0.5):
        goes_backward(net, batch(0)[0].bfloat16(), batch(0)[1])
        trainer.step(8)
        param.data.fill_(written)
    goes_backward(net, batch(0)[0].bfloat16(), batch(0)[1])
    trainer.step(8)
    assert param.detach().float().tolist() == pytest.approx([0.5] * 8, abs=0.01)


def test_write_on_one_device_alone_is_an_error() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(written_in_all_ways) == [["2.bias"] * 4]


def written_in_all_ways() -> list[str]:
    return [written_on_one_device(kind, counted) for kind in ("local", "allreduce") for counted in (True, False)]


def written_on_one_device(kind: str, is_counted: bool) -> str:
    net = replicate(mlp(), [mx.cpu(0), mx.cpu(1)])
    trainer = Trainer(net, "sgd", RATE, kind, update_on_kvstore=False)
    for step in range(STEPS):
        goes_backward(net, *batch(step))
        try:
            trainer.step(8)
        except PacelineError as error:
            assert step == 3
            return str(error).partition("'")[2].partition("'")[0]
        if step == 1:
            for one in net.collect_params()["2.bias"].list_data():
                one.add_(1.0)
        if step == 2:
            (net.collect_params()["2.bias"].data() if is_counted else net.replicas[1].get_parameter("2.bias").data)[
                :
            ] = 1.0
    return ""


def test_trainers_that_step_the_same_values_in_turn_are_refused_where_stores_hold_them() -> None:
    net = replicate(mlp(), [mx.cpu(0), mx.cpu(1)])
    trainers = [Trainer(net, "sgd", RATE, "local"), Trainer(net, "adam", {"learning_rate": 0.01}, "local")]
    goes_backward(net, *batch(0))
    trainers[0].step(8)
    goes_backward(net, *batch(1))
    with pytest.raises(PacelineError, match=r"'0\.weight' was changed"):
        trainers[1].step(8)


# ---- a second fit ---------------------------------------------------------------------------------------------------


def test_options_of_a_second_fit_that_do_not_count_are_told(caplog: pytest.LogCaptureFixture) -> None:
    module = Module(mlp())
    module.fit([batch(0)], optimizer_params=RATE)
    module.fit([batch(1)], optimizer_params=dict(RATE))
    assert not caplog.messages
    module.fit([batch(2)], optimizer="adam", optimizer_params={"learning_rate": 0.01})
    assert "the optimizer that it has, 'sgd' with {'learning_rate': 0.1}: force_init=True makes 'adam'" in caplog.text


# ---- a run that goes on ---------------------------------------------------------------------------------------------


def resumed(kind: str | None, path: str, scheduled: bool) -> float:
    """Train, save, and go on with a new trainer; return how far that is from a run of one process without a stop."""

    def options() -> dict[str, Any]:
        return {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.2)} if scheduled else dict(RATE)

    def train(net: Any, trainer: Trainer, steps: range, workers: int, rank: int) -> None:
        for step in steps:
            goes_backward(net, *(one.chunk(workers)[rank] for one in batch(step)))
            trainer.step(8)
            if not scheduled and step == 1:
                trainer.set_learning_rate(0.5)

    store = None if kind is None else kvstore.create(kind)
    workers, rank = (1, 0) if store is None else (store.num_workers, store.rank)
    net = replicate(mlp(), [mx.cpu(0)])
    trainer = Trainer(net, "adam", options(), store)
    train(net, trainer, range(3), workers, rank)
    trainer.save_states(path)
    if kind is not None:
        kvstore.create(kind).barrier()
    trainer = Trainer(net, "adam", options(), kind)
    trainer.load_states(path)
    train(net, trainer, range(3, STEPS), workers, rank)
    whole = replicate(mlp(), [mx.cpu(0)])
    train(whole, Trainer(whole, "adam", options(), None), range(STEPS), 1, 0)
    return apart(net.replicas, whole.replicas[0])


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("kind", [None, "dist_sync"])
def test_saved_rate_and_schedule_go_on(kind: str | None, scheduled: bool, tmp_path: Path) -> None:
    if kind is None:
        assert resumed(kind, str(tmp_path / "states"), scheduled) < 1e-5
        return
    with LocalJob(2, 1) as job:
        assert max(job.run(resumed, kind, str(tmp_path / "states"), scheduled)) < 1e-5
