"""DistributedDataParallel over the backend trains as over Gloo, bit for bit with two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.testing import LocalJob
from tests.ddp.test_group import start


class Net(torch.nn.Module):
    """Has a buffer, and a branch that some batches do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16)
        self.left, self.right = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor, branch: int = 0) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(inputs)))
        return (self.left, self.right)[branch](hidden) if branch < 2 else self.left(hidden) + self.right(hidden)


class Words(torch.nn.Module):
    """Has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return self.last(self.words(inputs.mul(10).long().remainder(20)))


def batches(sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(size, 6, generator=generator) for size in sizes]


def plain(model: Any, optimizer: Any) -> None:
    for inputs in batches([8, 8, 8, 3 + dist.get_rank()]):
        optimizer.zero_grad()
        model(inputs, 2).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if not one.grad.is_sparse], 1.0)
        optimizer.step()


def accumulating(model: Any, optimizer: Any) -> None:
    for number, inputs in enumerate(batches([8] * 6)):
        is_last = number % 3 == 2
        with contextlib.nullcontext() if is_last else model.no_sync():
            model(inputs, 2).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def with_unused(model: Any, optimizer: Any) -> None:
    for number, inputs in enumerate(batches([8] * 4)):
        optimizer.zero_grad()
        model(inputs, (number + dist.get_rank()) % 2).square().mean().backward()
        optimizer.step()


def uneven(model: Any, optimizer: Any, **options: bool) -> None:
    with model.join(**options):
        for inputs in batches([8] * (2 + 2 * dist.get_rank())):
            optimizer.zero_grad()
            model(inputs, 2).square().mean().backward()
            optimizer.step()


CASES: dict[str, tuple[Callable[[Any, Any], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "many buckets": (plain, {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}),
    "static graph": (plain, {"static_graph": True}),
    "accumulating": (accumulating, {}),
    "unused": (with_unused, {"find_unused_parameters": True}),
    "uneven": (uneven, {}),
    "uneven, means of those that go on": (partial(uneven, divide_by_initial_world_size=False), {}),
    "sparse": (plain, {}),
}
NETS: dict[str, type[torch.nn.Module]] = {"sparse": Words}


def trained(case: str, group: Any) -> torch.nn.Module:
    loop, options = CASES[case]
    torch.manual_seed(dist.get_rank())  # DDP starts all ranks from rank 0's weights
    model = DistributedDataParallel(NETS.get(case, Net)(), process_group=group, **options)
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return model


def compare(folder: str, hosts: str) -> dict[str, bool]:
    start(hosts, folder)
    ours = dist.new_group(backend="paceline")
    same = {}
    for case in CASES:
        mine, theirs = trained(case, ours).state_dict(), trained(case, dist.group.WORLD).state_dict()
        same[case] = all(torch.equal(mine[name], value) for name, value in theirs.items())
    return same


def test_training_equals_gloo_bit_for_bit(tmp_path: Path) -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        assert job.run(compare, str(tmp_path), "aa") == [dict.fromkeys(CASES, True)] * 2


def test_training_of_ranks_on_two_hosts_equals_gloo_bit_for_bit(tmp_path: Path) -> None:
    with LocalJob(num_workers=2, num_servers=2) as job:
        assert job.run(compare, str(tmp_path), "ab") == [dict.fromkeys(CASES, True)] * 2
