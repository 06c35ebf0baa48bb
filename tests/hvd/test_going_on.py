"""Scripts that go on after ``shutdown`` and ``init``, or with another optimizer, train as one process does."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import paceline.hvd as hvd
from paceline.collectives import world
from tests.hvd.ranks import run, run_in_turn

STEPS, FAILS, ROWS = 8, 4, 4
FAILURES = ("between steps", "in backward")
AGAIN = ("another optimizer", "the same one", "in the next job")
Found: TypeAlias = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of both ranks, by function and arguments."""
    calls = [(failing, way) for way in FAILURES] + [(wrapping_again, way) for way in AGAIN]
    return run_in_turn(2, *calls, without_planes, adasum_after_means)


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def momentum(net: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def loss(net: nn.Module, step: int, alone: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS * hvd.size(), 6, generator=generator, dtype=torch.float64)
    mine: torch.Tensor = net(x if alone else x[ROWS * hvd.rank() : ROWS * (hvd.rank() + 1)])
    return mine.square().mean()


def train(net: nn.Module, optimizer: Any, steps: range, alone: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(net, step, alone).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def failing(way: str) -> float:
    """Rank 1 fails once, with gradients that were sent or not; all ranks go on as Horovod's elastic loops do."""
    hvd.init()
    alone, net = network(), network()
    train(alone, momentum(alone), range(STEPS), alone=True)
    optimizer = hvd.DistributedOptimizer(momentum(net), net.named_parameters())
    step, has_failed = 0, False
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    while step < STEPS:
        try:
            fails = step == FAILS and not has_failed and hvd.rank() == 1
            if fails and way == "between steps":
                raise hvd.HorovodInternalError("this rank fails")
            optimizer.zero_grad()
            found = loss(net, step, False)
            if fails:
                handle = net.get_parameter("2.bias").register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]
                with pytest.raises(ZeroDivisionError):
                    found.backward()  # type: ignore[no-untyped-call]
                handle.remove()
                raise hvd.HorovodInternalError("this rank fails in backward")
            found.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        except hvd.HorovodInternalError:
            has_failed = True
            hvd.shutdown()
            hvd.init()
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            step = hvd.broadcast_object(step, 0)
            hvd.broadcast_parameters(net.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.barrier()
    return difference(alone, net)


@pytest.mark.parametrize("way", FAILURES)
def test_optimizer_goes_on_in_the_next_job_after_a_failure(way: str, found: Found) -> None:
    assert found[f"failing {way}"] == [pytest.approx(0, abs=1e-12)] * 2


def wrapping_again(way: str) -> Any:
    hvd.init()
    alone, net = network(), network()
    named = list(net.named_parameters())
    inner = momentum(alone)
    train(alone, inner, range(STEPS), alone=True)
    if way == "another optimizer":
        train(alone, momentum(alone, 0.01), range(STEPS), alone=True)
    else:
        train(alone, inner, range(STEPS), alone=True)
    first = hvd.DistributedOptimizer(momentum(net), named)
    train(net, first, range(STEPS))
    if way == "in the next job":
        hvd.shutdown()
        hvd.init()
    second = hvd.DistributedOptimizer(momentum(net, 0.01) if way == "another optimizer" else first, named)
    train(net, second, range(STEPS))
    with pytest.raises(AssertionError) as error:
        first.step()
    hvd.barrier()
    return difference(alone, net), str(error.value)


@pytest.mark.parametrize("way", AGAIN)
def test_parameters_that_are_wrapped_again_are_reduced_once(way: str, found: Found) -> None:
    for apart, text in found[f"wrapping_again {way}"]:
        assert apart == pytest.approx(0, abs=1e-12)
        assert "was made later reduces parameters of this one" in text


def leaving_early() -> list[Any]:
    """Rank 1 shuts down with an operation that rank 0 waits for. It fails or ends, and later ones are right."""
    found: list[Any] = []
    for _ in range(3):
        hvd.init()
        tensor = torch.full((3,), hvd.rank() + 1.0)
        hvd.allreduce(tensor, name="early", op=hvd.Sum)
        handle = hvd.allreduce_async(tensor, name="early", op=hvd.Sum)
        try:
            found.append(hvd.synchronize(handle).tolist() if hvd.rank() == 0 else None)
        except hvd.HorovodInternalError as error:
            found.append(str(error))
        hvd.shutdown()
        hvd.init()
        found.append([hvd.allreduce(torch.full((2000,), float(one)), op=hvd.Sum).sum().item() for one in range(9)])
        hvd.barrier()
        hvd.shutdown()
    return found


def test_operation_that_a_rank_leaves_behind_stops_nobody() -> None:
    for found in run(leaving_early, 2, environment={"HOROVOD_GLOO_TIMEOUT_SECONDS": "1000"}):
        for outcome in found[::2]:
            assert outcome in ([3.0] * 3, None) or "shut down by rank 1: hvd.shutdown() was called" in outcome
        assert found[1::2] == [[4000.0 * one for one in range(9)]] * 3


def without_planes() -> list[float]:
    """One rank has no planes any more when the next job begins."""
    found = []
    for number in range(3):
        hvd.init()
        found.append(hvd.allreduce(torch.ones(3) + hvd.rank(), op=hvd.Sum).sum().item())
        hvd.barrier()
        base = world.current().base
        hvd.shutdown()
        if base.place.rank == number:
            base.drop_planes()
    return found


def test_planes_that_one_rank_has_dropped_are_made_anew_by_all(found: Found) -> None:
    assert found["without_planes"] == [[9.0] * 3] * 2


def adasum_after_means() -> float:
    """Weights of Adasum alone, and with parameters that another optimizer has reduced before."""
    hvd.init()
    nets = [network(), network()]
    for net in nets:
        if net is nets[1]:
            hvd.DistributedOptimizer(momentum(net), net.named_parameters())
        optimizer = hvd.DistributedOptimizer(momentum(net), net.named_parameters(), op=hvd.Adasum)
        train(net, optimizer, range(STEPS))
    return difference(*nets)


def test_adasum_of_parameters_that_were_wrapped_before_reduces_no_gradients(found: Found) -> None:
    assert found["adasum_after_means"] == [pytest.approx(0, abs=1e-12)] * 2
