"""Loops as scripts have them, with ``--ddp --shares measured``: one process with the joined batches is the oracle.

Speeds are made up, so that shares change at nearly every step.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline.errors import ConfigError
from paceline.hetero import Speed, SpeedMeter
from paceline.testing import LocalJob
from tests.ddp.test_backend import open_group

BATCH, LENGTH, WORKERS = 8, 120, 2
#: Seconds per sample of both ranks, in turn.
SPEEDS = [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0), (7.0, 1.0), (1.0, 5.0)]

_asked = itertools.count()
_sizes: list[int] = []
_added: list[float] = []


def speed(meter: SpeedMeter) -> Speed:
    return Speed(0.0, SPEEDS[next(_asked) % len(SPEEDS)][dist.get_rank()])


def add(meter: SpeedMeter, samples: float, seconds: float) -> None:
    _added.append(samples)


def opened() -> None:
    os.environ["PACELINE_DDP"] = "measured"
    SpeedMeter.speed, SpeedMeter.add = speed, add  # type: ignore[method-assign]
    open_group("gloo")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(LENGTH, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (LENGTH,), generator=generator))


def layers(*sizes: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    pairs = [(torch.nn.Linear(one, two), torch.nn.Tanh()) for one, two in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*itertools.chain(*pairs)).double()


def net() -> torch.nn.Module:
    return layers(6, 16, 3)


class Branches(torch.nn.Module):
    """Some batches do not take one branch, or the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.left, self.right = layers(6, 3), layers(6, 3), layers(6, 3)
        self.batches = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        return self.always(inputs) + (self.left, self.right)[self.batches % 2](inputs)


class Again(torch.nn.Sequential):
    """Computes its layers again in the backward pass, and their gradients in one inside of it."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)  # type: ignore[no-untyped-call]


class Words(torch.nn.Module):
    """Has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.last = layers(4, 3)
        self.words = torch.nn.Embedding(20, 4, sparse=True).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.words((inputs[:, 0] * 10).long() % 20))


def joined(batch: int, epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the batches of all ranks together."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch))
    yield from ((data()[part]) for part in order.split(batch * WORKERS))


def synced(model: Any, number: int, every: int) -> Any:
    """Return the context of a batch, of which some make a step."""
    alone = number % every == every - 1 or not isinstance(model, DistributedDataParallel)
    return contextlib.nullcontext() if alone else model.no_sync()


# ---- loops: a model, its optimizer, and the batches of an epoch ----------------------------------------------------


def plain(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def accumulates(model: Any, optimizer: Any, batches: Any) -> None:
    for number, (x, y) in enumerate(batches):
        with synced(model, number, 3):
            cross_entropy(model(x), y).backward()
        if number % 3 == 2:
            torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if not one.grad.is_sparse], 0.3)
            optimizer.step()
            optimizer.zero_grad()


def accumulates_without_no_sync(model: Any, optimizer: Any, batches: Any) -> None:
    for number, (x, y) in enumerate(batches):
        cross_entropy(model(x), y).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def scales(model: Any, optimizer: Any, batches: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for number, (x, y) in enumerate(batches):
        with synced(model, number, 2):
            scaler.scale(cross_entropy(model(x), y)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def two_losses(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        model(x).square().mean().backward()
        optimizer.step()


def in_eval_mode(model: Any, optimizer: Any, batches: Any) -> None:
    """Train a model whose dropout and batch normalisation are off for some batches."""
    for number, (x, y) in enumerate(batches):
        model.train(number % 3 == 1)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    model.train()


def validates(model: Any, optimizer: Any, batches: Any) -> None:
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 3 and isinstance(model, DistributedDataParallel):
            model.eval()
            evaluate(model, shuffle=False)
            with torch.no_grad():
                evaluate(model, shuffle=True)  # what DistributedSampler does where a script says nothing
            model.train()


def evaluate(model: Any, shuffle: bool) -> None:
    loader = DataLoader(data(), batch_size=5, sampler=DistributedSampler(data(), shuffle=shuffle))
    found = [model(x) for x, _ in loader]
    assert {len(one) for one in found} == {5}
    dist.all_gather([torch.empty_like(found[0]) for _ in range(WORKERS)], found[0].detach())


def leaves_early(model: Any, optimizer: Any, batches: Any) -> None:
    plain(model, optimizer, itertools.islice(batches, 4))


def skips(model: Any, optimizer: Any, batches: Any) -> None:
    for number, (x, y) in enumerate(batches):
        loss = cross_entropy(model(x), y)
        if number % 4 != 1:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def copies(model: Any, optimizer: Any, batches: Any) -> None:
    """Train a copy beside its moving average, save it whole, and take its weights."""
    copied, average = copy.deepcopy(model), AveragedModel(model)
    steps = torch.optim.SGD(copied.parameters(), lr=0.2)
    for x, y in batches:
        steps.zero_grad()
        cross_entropy(copied(x), y).backward()
        steps.step()
        average.update_parameters(copied)
        with torch.no_grad():
            average(x)
    torch.save(copied, io.BytesIO())
    model.load_state_dict(copied.state_dict())


def closures(model: Any, optimizer: Any, batches: Any) -> None:
    """Compute a batch several times for a step."""
    steps = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for x, y in batches:

        def loss(x: Any = x, y: Any = y) -> Any:
            steps.zero_grad()
            (found := cross_entropy(model(x), y)).backward()
            return found

        steps.step(loss)


def penalizes(model: Any, optimizer: Any, batches: Any) -> None:
    """Take two views of each sample in one loss, and the gradient of the inputs."""
    for x, y in batches:
        optimizer.zero_grad()
        one, other = model(x.requires_grad_()), model(x.flip(1))
        (slope,) = torch.autograd.grad(one.sum(), x, create_graph=True)
        (cross_entropy(one, y) + (one - other).square().mean() + slope.square().sum(1).mean()).backward()
        optimizer.step()


LOOPS: dict[str, tuple[Callable[..., None], dict[str, Any], dict[str, Any]]] = {
    "plain": (plain, {}, {}),
    "parts of two samples": (plain, {}, {"batch_size": 2}),
    "last batch left out": (plain, {}, {"batch_size": 9, "drop_last": True}),
    "last batch small": (plain, {}, {"batch_size": 29}),
    "accumulates": (accumulates, {}, {}),
    "accumulates without no_sync": (accumulates_without_no_sync, {}, {}),
    "scales": (scales, {}, {}),
    "two losses": (two_losses, {}, {}),
    "in eval mode": (in_eval_mode, {}, {}),
    "validates": (validates, {}, {}),
    "leaves early": (leaves_early, {}, {}),
    "leaves early, workers persist": (leaves_early, {}, {"num_workers": 2, "persistent_workers": True}),
    "skips": (skips, {}, {}),
    "copies": (copies, {}, {}),
    "static graph": (plain, {"static_graph": True}, {}),
    "views of buckets": (accumulates, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}, {}),
    "unused": (accumulates, {"find_unused_parameters": True}, {}),
    "sparse": (accumulates, {}, {}),
    "closures": (closures, {}, {}),
    "penalizes": (penalizes, {}, {}),
    "again": (accumulates, {}, {}),
}
NETS: dict[str, Callable[[], torch.nn.Module]] = {"unused": Branches, "sparse": Words, "again": lambda: Again(*net())}


def run(name: str) -> tuple[float, list[int]]:
    """Train a loop for three epochs; returns how far its weights are from one process, and its sizes of batches."""
    loop, of_ddp, of_loader = LOOPS[name]
    own = NETS.get(name, net)()
    single = copy.deepcopy(own)
    model = DistributedDataParallel(own, **of_ddp)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2, momentum=0.9) for one in (own, single)]
    sampler: Any = DistributedSampler(data(), drop_last=of_loader.get("drop_last", False))
    loader = DataLoader(data(), sampler=sampler, **{"batch_size": BATCH} | of_loader)
    _sizes.clear()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loop(model, optimizers[0], noted(loader))
        batch = loader.batch_size or 0
        whole = joined(batch, epoch)
        loop(
            single, optimizers[1], (one for one in whole if not of_loader.get("drop_last") or len(one[0]) == batch * 2)
        )
    dist.barrier()
    return far(own, single), list(_sizes)


def noted(loader: Any) -> Iterator[Any]:
    for x, y in loader:
        _sizes.append(len(x))
        yield x, y


def far(one: torch.nn.Module, two: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((mine - yours).detach().abs().max()) for mine, yours in pairs)


def all_loops() -> dict[str, tuple[float, list[int]]]:
    opened()
    return {name: run(name) for name in LOOPS}


def test_unchanged_loops_train_as_one_process_with_the_joined_batches() -> None:
    with LocalJob(num_workers=WORKERS, num_servers=1) as job:
        one, two = job.run(all_loops)
    for name in LOOPS:
        assert max(one[name][0], two[name][0]) < 1e-9, name
        assert len({*one[name][1], *two[name][1]}) > (1 if "two samples" in name else 3), name


# ---- evaluation ----------------------------------------------------------------------------------------------------


def evaluates() -> list[Any]:
    """Train with unlike parts; walk a loader that shuffles in eval(), and then train on another one like that."""
    opened()
    own = net()
    single = copy.deepcopy(own)
    model = DistributedDataParallel(own)
    steps, alone = (torch.optim.SGD(one.parameters(), lr=0.2) for one in (own, single))
    plain(model, steps, noted(loader_of()))
    trained = len({*_sizes}) > 3
    plain(single, alone, joined(BATCH, 0))
    model.eval()
    _sizes.clear()
    for x, _ in noted(loader_of()):
        with torch.no_grad():
            model(x)
    plain(model, steps, noted(loader_of()))
    plain(single, alone, joined(BATCH, 0))
    dist.barrier()
    return [trained, _sizes, far(own, single)]


def test_evaluation_has_equal_parts_and_training_in_eval_mode_is_exact() -> None:
    with LocalJob(num_workers=WORKERS, num_servers=1) as job:
        for trained, sizes, distance in job.run(evaluates):
            assert trained
            assert sizes == [*[BATCH] * 7, 4] * 2
            assert distance < 1e-12


# ---- several models, several groups --------------------------------------------------------------------------------


def adversaries() -> list[Any]:
    """Two models, two optimizers, and three backward passes for a batch; then once more in another group."""
    opened()
    found = [trained_pair()]
    dist.destroy_process_group()
    open_group("gloo")
    return [*found, trained_pair(), set(_added) <= set(_sizes), len(_added)]


def trained_pair() -> float:
    owns, singles = ([layers(4, 8, 6), layers(6, 8, 1)] for _ in range(2))
    models = [DistributedDataParallel(one) for one in owns]
    loader = DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data()))
    compete(models, noted(loader))
    compete(singles, joined(BATCH, 0))
    return max(far(one, two) for one, two in zip(owns, singles, strict=True))


def compete(models: Any, batches: Any) -> None:
    maker, judge = models
    steps, judged = (torch.optim.SGD(one.parameters(), lr=0.1) for one in models)
    for x, _ in batches:
        real, false = torch.ones(len(x), 1).double(), torch.zeros(len(x), 1).double()
        judged.zero_grad()
        binary_cross_entropy_with_logits(judge(x), real).backward()
        made = maker(x[:, :4])
        binary_cross_entropy_with_logits(judge(made.detach()), false).backward()
        judged.step()
        steps.zero_grad()
        binary_cross_entropy_with_logits(judge(made), real).backward()
        steps.step()


def test_two_models_train_as_in_one_process_and_both_steps_count_for_the_time_of_a_batch() -> None:
    with LocalJob(num_workers=WORKERS, num_servers=1) as job:
        for first, second, are_batches, count in job.run(adversaries):
            assert max(first, second) < 1e-9
            assert are_batches
            assert count >= LENGTH // BATCH // WORKERS


# ---- batch normalisation -------------------------------------------------------------------------------------------


def normalised() -> list[int]:
    opened()
    model = DistributedDataParallel(
        torch.nn.Sequential(layers(6, 16), torch.nn.BatchNorm1d(16).double(), layers(16, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (3, 29):  # the last batch of both ranks has 2 samples more than 58 * 2
        _sizes.append(-batch)
        plain(model, optimizer, noted(DataLoader(data(), batch_size=batch, sampler=DistributedSampler(data()))))
    return list(_sizes)


def test_batch_normalisation_gets_two_samples_or_more() -> None:
    with LocalJob(num_workers=WORKERS, num_servers=1) as job:
        for sizes in job.run(normalised):
            assert min(size for size in sizes if size > 0) == 2
            assert len(set(sizes)) > 4


# ---- refusals ------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data()


def loader_of() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data()))


def refusals() -> list[str]:
    opened()

    def mixes(model: Any) -> None:
        losses = [cross_entropy(model(x), y) for x, y in itertools.islice(loader_of(), 2)]
        sum(losses).backward()  # type: ignore[union-attr]

    def repeats(model: Any) -> None:
        for x, y in loader_of():
            outputs = model(x)
            with model.no_sync():
                outputs.mean().backward(retain_graph=True)
            cross_entropy(outputs, y).backward(retain_graph=True)
            outputs.abs().mean().backward()

    def streams(model: Any) -> None:
        for x, y in DataLoader(Stream(), batch_size=BATCH):
            cross_entropy(model.eval()(x), y).backward()

    def zips(model: Any) -> None:
        for (x, y), _ in zip(loader_of(), loader_of(), strict=True):
            cross_entropy(model(x), y).backward()

    found = []
    for loop in (streams, zips, mixes, repeats):
        with pytest.raises(ConfigError) as caught:
            loop(DistributedDataParallel(net()))
        found.append(str(caught.value))
        dist.barrier()
    return found


def test_loops_that_cannot_be_exact_end_with_the_way_out() -> None:
    with LocalJob(num_workers=WORKERS, num_servers=1) as job:
        for streams, zips, mixes, repeats in job.run(refusals):
            assert "Add up the losses, and call backward() once" in repeats
            assert "call backward() for each" in mixes
            assert "needs a DistributedSampler of torch with shuffle=True" in streams
            assert "batches of one loader at a time" in zips
            assert all("leave out --shares measured" in text for text in (mixes, streams, zips))
