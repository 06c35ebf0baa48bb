"""``--ddp --shares measured``: samples by speed, with the weights of one process that has the joined batches."""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.errors import ConfigError, PacelineError
from paceline.testing import LocalJob
from tests.ddp.test_backend import open_group

BATCH, LENGTH = 8, 200


class Work(torch.autograd.Function):
    """Takes a time by samples in the backward pass, three times as long on rank 1."""

    sample_s = 0.0

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.samples = len(inputs)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(ctx.samples * Work.sample_s * (3 if dist.get_rank() == 1 else 1))
        return gradient


class Slow(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Work.apply(inputs) if Work.sample_s else inputs


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), Slow(), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(LENGTH, 6, generator=generator, dtype=torch.float64),
        torch.randint(3, (LENGTH,), generator=generator),
    )


def opened() -> None:
    os.environ["PACELINE_DDP"] = "measured"
    open_group("gloo")


def epoch(model: Any, optimizer: Any, batches: Any, accumulated: int, no_sync: Callable[[], Any]) -> list[Any]:
    """Train on batches, some of them in each step; returns their sizes and times."""
    found, began = [], time.monotonic()
    for number, (x, y) in enumerate(batches, start=1):
        is_last = number % accumulated == 0 or number == len(batches)
        with contextlib.nullcontext() if is_last else no_sync():
            torch.nn.functional.cross_entropy(model(x), y).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        before, began = began, time.monotonic()
        found.append((len(x), began - before))
    return found


def trained(drop_last: bool, workers: int, accumulated: int, sample_s: float) -> list[Any]:
    """Train an unchanged loop; returns how far its weights are from one process, sizes of batches, and their times."""
    opened()
    own, size = net(), dist.get_world_size()
    single = copy.deepcopy(own)
    sampler: Any = DistributedSampler(data(), seed=3, drop_last=drop_last)
    loader = DataLoader(data(), batch_size=BATCH, sampler=sampler, drop_last=drop_last, num_workers=workers)
    model = DistributedDataParallel(own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    alone = torch.optim.SGD(single.parameters(), lr=0.2, momentum=0.9)
    found = []
    for number in range(3):
        sampler.set_epoch(number)
        Work.sample_s = sample_s
        found += epoch(model, optimizer, loader, accumulated, model.no_sync)
        Work.sample_s = 0.0
        epoch(single, alone, whole_batches(number, drop_last, size), accumulated, contextlib.nullcontext)
    far = max(float((one - two).abs().max()) for one, two in zip(own.parameters(), single.parameters(), strict=True))
    dist.barrier()
    return [far, *map(list, zip(*found, strict=True))]


def whole_batches(epoch: int, drop_last: bool, size: int) -> list[Any]:
    """Return the batches of all ranks together, as PyTorch's own sampler deals them."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
    total = LENGTH // size * size if drop_last else -(-LENGTH // size) * size
    order = [*order, *order[: max(0, total - LENGTH)]][:total]
    whole = BATCH * size
    stop = total - total % whole if drop_last else total
    x, y = data().tensors
    return [(x[order[at : at + whole]], y[order[at : at + whole]]) for at in range(0, stop, whole)]


def test_unequal_parts_train_as_one_process_with_the_joined_batches_and_faster() -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        found = job.run(trained, False, 0, 1, 0.004)
    assert max(far for far, *_ in found) < 1e-12
    for one, two in zip(*(sizes for _, sizes, _ in found), strict=True):
        assert one + two in (16, LENGTH % 16)
    fast, slow = (sizes[-2] for _, sizes, _ in found)
    assert fast > 1.8 * slow
    equal, measured = (statistics.median(found[0][2][part]) for part in (slice(1, 5), slice(-15, -1)))
    assert equal > 1.25 * measured  # 96 ms of the slow worker against 48 ms of both, and the exchange


@pytest.mark.parametrize(("drop_last", "workers", "accumulated"), [(True, 2, 1), (False, 0, 3)])
def test_parts_are_exact_with_loader_processes_and_when_gradients_accumulate(
    drop_last: bool, workers: int, accumulated: int
) -> None:
    with LocalJob(num_workers=3, num_servers=1) as job:
        found = job.run(trained, drop_last, workers, accumulated, 0.001)
    assert max(far for far, *_ in found) < 1e-12
    assert len({sizes[-2] for _, sizes, _ in found}) > 1


def refusals() -> list[str]:
    opened()
    found = []

    def refused(call: Callable[[], Any], kind: type[Exception] = ConfigError) -> None:
        with pytest.raises(kind) as caught:
            call()
        found.append(str(caught.value))

    model = DistributedDataParallel(net())
    x = data()[:BATCH][0]
    refused(lambda: model(x))
    refused(lambda: model.register_comm_hook(None, lambda state, bucket: None))
    refused(lambda: DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))))
    plain = DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data(), shuffle=False))
    refused(lambda: [model(one) for one, _ in plain])
    loader = DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data()))
    refused(lambda: [model(part) for one, _ in loader for part in one.split(3)])
    with torch.no_grad():
        model(x)  # of an evaluation
    dist.barrier()
    return found


def test_what_cannot_be_exact_is_refused_with_the_way_out() -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        for unseen, hook, norm, unshuffled, split in job.run(refusals):
            assert "needs a DistributedSampler of torch with shuffle=True" in unseen
            assert "SharedBatchSampler" in unseen
            assert "leave out the script's hook" in hook
            assert "SyncBatchNorm" in norm
            assert unshuffled == unseen
            assert "inputs of [3] rows" in split
            assert all("leave out" in text for text in (unseen, hook, norm, split))


def with_sums(reduction: str) -> list[int]:
    opened()
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    Work.sample_s = 0.002
    found = []
    for _ in range(4):
        for x, y in DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data())):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
            found.append(len(x))
    dist.barrier()
    return found


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_losses_that_are_sums_train_and_are_named_once(reduction: str) -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        sizes, _ = job.run(with_sums, reduction)
        assert len(set(sizes)) > 1
        assert job.report().count("losses grow with the batch, as sums over samples do: ") == (reduction == "sum")


def walks_unlike() -> str:
    opened()
    model = DistributedDataParallel(net())
    loader = DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data()))
    batches = iter(loader)

    def train() -> None:
        for number in range(20):
            x, y = next(batches)
            if number == 2 and dist.get_rank() == 1:
                x, y = next(batches)
            torch.nn.functional.cross_entropy(model(x), y).backward()

    with pytest.raises(PacelineError) as caught:
        train()
    dist.barrier()
    return str(caught.value)


def test_workers_that_train_on_parts_of_unlike_batches_are_named() -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        for text in job.run(walks_unlike):
            assert "rank 0: 8 samples of batch 2 of walk 1; rank 1: 8 samples of batch 3 of walk 1" in text
