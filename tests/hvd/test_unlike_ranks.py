"""Ranks that make unlike numbers of steps, and ranks of process sets that train models of their own."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import paceline.hvd as hvd
from tests.hvd.ranks import run_in_turn

EPOCHS, STEPS, ROWS = 2, 3, 4
Found: TypeAlias = dict[str, list[float]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of all ranks, by function and arguments."""
    joined = [(joining, "", None), (joining, "", 2), (joining, "fp16", None)]
    return run_in_turn(3, *joined, (grouped, True), (grouped, False))


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(net: nn.Module, number: int) -> list[torch.Tensor]:
    """Compute new gradients; returns them."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(ROWS, 5, generator=generator), torch.randint(3, (ROWS,), generator=generator)
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
    return [param.grad for param in net.parameters() if param.grad is not None]


def number_of(epoch: int, step: int, rank: int) -> int:
    return 1000 * epoch + 10 * step + rank


def expected() -> nn.Module:
    """Return the net of the last rank to join; one that has joined counts as zeros in means."""
    nets = [network() for _ in range(hvd.size())]
    for epoch in range(EPOCHS):
        for step in range(STEPS + hvd.size() - 1):
            active = [rank for rank in range(hvd.size()) if step < STEPS + rank]
            found = [backward(nets[rank], number_of(epoch, step, rank)) for rank in active]
            for rank in active:
                for param, *grads in zip(nets[rank].parameters(), *found, strict=True):
                    param.data -= 0.1 * torch.stack(grads).sum(0) / hvd.size()
        for net in nets[:-1]:
            net.load_state_dict(nets[-1].state_dict())
    return nets[-1]


def joining(codec: str, groups: int | None) -> float:
    hvd.init()
    net = network()
    compression: Any = hvd.CodecCompression(codec) if codec else hvd.Compression.none
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), compression, groups=groups)
    for epoch in range(EPOCHS):
        for step in range(STEPS + hvd.rank()):
            optimizer.zero_grad()
            backward(net, number_of(epoch, step, hvd.rank()))
            optimizer.step()
        hvd.broadcast_parameters(net.state_dict(), root_rank=hvd.join())
    pairs = zip(net.parameters(), expected().parameters(), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


@pytest.mark.parametrize(("codec", "groups", "most"), [("", None, 1e-6), ("", 2, 1e-6), ("fp16", None, 1e-3)])
def test_ranks_that_have_joined_count_as_zeros_in_the_steps_of_others(
    codec: str, groups: int | None, most: float, found: Found
) -> None:
    assert found[f"joining {codec} {groups}"] == [pytest.approx(0, abs=most)] * 3


def grouped(everyone: bool) -> float:
    """The ranks of each set train a net with other names; or only those of the second do."""
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1, 2])]
    hvd.init(process_sets=sets)
    net, mine = network(), sets[hvd.rank() > 0]
    if everyone or hvd.rank() > 0:
        named = [(f"{mine}.{name}", param) for name, param in net.named_parameters()]
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, named, groups=2, process_set=mine)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(net, number_of(0, step, hvd.rank()))
            optimizer.step()
    hvd.barrier()
    return sum(param.sum().item() for param in net.parameters())


@pytest.mark.parametrize("everyone", [True, False])
def test_groups_of_parameters_are_those_of_the_process_set(everyone: bool, found: Found) -> None:
    first, second, third = found[f"grouped {everyone}"]
    assert second == third != first
