"""Loops that change their optimizer or their gradients train as one process does, or end with the way out."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import paceline.hvd as hvd
from paceline.errors import PacelineError
from tests.hvd.ranks import run

STEPS, CHANGE, ROWS = 10, 4, 3
Wrap = Callable[..., Any]
Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def decaying(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.02)


def steps(net: nn.Module, optimizer: Any, batch: Batch, change: Any = None, after_backward: Any = None) -> None:
    for step in range(STEPS):
        if step == CHANGE and change is not None:
            change()
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        if after_backward is not None:
            after_backward()
        optimizer.step()


def group_added(net: Any, wrap: Wrap, batch: Batch) -> None:
    optimizer = wrap(decaying(net[2].parameters()), net)
    steps(net, optimizer, batch, lambda: optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.02}))


def groups_replaced(net: Any, wrap: Wrap, batch: Batch) -> None:
    optimizer = wrap(decaying(net[2].parameters()), net)

    def change() -> None:
        old = optimizer.param_groups[0]
        optimizer.param_groups = [old, {**old, "params": list(net[0].parameters()), "lr": 0.02}]

    steps(net, optimizer, batch, change)


def schedule_made_before(net: Any, wrap: Wrap, batch: Batch) -> None:
    """Ranks get the state of rank 0 with new param groups, and the schedule goes on with the inner optimizer."""
    inner = decaying(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
    optimizer = wrap(inner, net)
    if optimizer is not inner:
        hvd.broadcast_optimizer_state(optimizer, 0)
    steps(net, optimizer, batch, after_backward=schedule.step)


def state_of_the_inner_one_replaced(net: Any, wrap: Wrap, batch: Batch) -> None:
    inner = decaying(net.parameters())

    def change() -> None:
        inner.state = collections.defaultdict(dict)

    steps(net, wrap(inner, net), batch, change)


def unfrozen_and_clipped(net: Any, wrap: Wrap, batch: Batch) -> None:
    net[0].requires_grad_(False)
    optimizer = wrap(decaying(net.parameters()), net)
    steps(net, optimizer, batch, lambda: net[0].requires_grad_(True), lambda: clip_grad_norm_(net.parameters(), 0.05))


def frozen_and_clipped(net: Any, wrap: Wrap, batch: Batch) -> None:
    optimizer = wrap(decaying(net.parameters()), net)
    steps(net, optimizer, batch, lambda: net[0].requires_grad_(False), lambda: clip_grad_norm_(net.parameters(), 0.05))


def hooks_after_wrapping(net: Any, wrap: Wrap, batch: Batch) -> None:
    """Gradients may be on their way by then."""
    optimizer = wrap(decaying(net.parameters()), net)

    def another(param: Any) -> None:
        param.grad = 0.5 * param.grad

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(another)
    steps(net, optimizer, batch)


def step_hooks(net: Any, wrap: Wrap, batch: Batch) -> None:
    """They run once, also after a state was loaded: each takes away a part of the weights."""
    optimizer = wrap(decaying(net.parameters()), net)
    optimizer.register_step_post_hook(lambda *_: [param.data.mul_(0.9) for param in net.parameters()])
    steps(net, optimizer, batch, lambda: optimizer.load_state_dict(optimizer.state_dict()))


def closure_that_synchronizes(net: Any, wrap: Wrap, batch: Batch) -> None:
    """The sums that are clipped in the closure are not added up again."""
    inner = decaying(net.parameters())
    optimizer = wrap(inner, net, op=hvd.Sum)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer is not inner:
            optimizer.synchronize()
        clip_grad_norm_(net.parameters(), 0.5)
        return loss

    for step in range(STEPS):
        x, y = batch(step)
        with optimizer.skip_synchronize() if optimizer is not inner and step % 2 else contextlib.nullcontext():
            optimizer.step(closure)


def tied_under_two_names(net: Any, wrap: Wrap, batch: Batch) -> None:
    net.insert(2, nn.Linear(8, 8).double())
    net.insert(3, nn.Linear(8, 8).double())
    net[3].weight = net[2].weight
    named = list(net.named_parameters(remove_duplicate=False))
    assert len(named) == len(list(net.parameters())) + 1
    steps(net, wrap(decaying(net.parameters()), net, named), batch)


def whole_numbers(net: Any, wrap: Wrap, batch: Batch) -> None:
    """A parameter that can have no gradient is left alone."""
    net.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    steps(net, wrap(decaying(net.parameters()), net), batch)
    assert net.count.tolist() == [3]


def closure_of_lbfgs(net: Any, wrap: Wrap, batch: Batch) -> None:
    """With the mean loss of all ranks each takes the same steps."""
    inner = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    optimizer = wrap(inner, net)
    x, y = batch(0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss if optimizer is inner else hvd.allreduce(loss.detach(), name="loss")

    for _ in range(3):
        optimizer.step(closure)


LOOPS = [
    group_added, groups_replaced, schedule_made_before, state_of_the_inner_one_replaced, unfrozen_and_clipped,
    frozen_and_clipped, hooks_after_wrapping, step_hooks, closure_that_synchronizes, tied_under_two_names,
    whole_numbers, closure_of_lbfgs,
]  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def weights(loop: Any, wrap: Wrap, mine: slice) -> torch.Tensor:
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS * hvd.size(), 5, generator=generator, dtype=torch.float64)
        return x[mine], torch.randint(3, (len(x),), generator=generator)[mine]

    net = network()
    loop(net, wrap, batch)
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def distributed(optimizer: torch.optim.Optimizer, net: nn.Module, named: Any = None, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named or net.named_parameters(), **options)


def differences() -> dict[str, float | str]:
    """Return how much each loop differs from one process with the joined batch."""
    hvd.init()
    found: dict[str, float | str] = {}
    for loop in LOOPS:
        alone = weights(loop, lambda one, *_, **__: one, slice(None))
        try:
            ours = weights(loop, distributed, slice(ROWS * hvd.rank(), ROWS * (hvd.rank() + 1)))
            found[loop.__name__] = (ours - alone).abs().max().item()
        except AssertionError as error:
            found[loop.__name__] = str(error)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, float | str]]:
    return run(differences, 2)


@pytest.mark.parametrize("name", [loop.__name__ for loop in LOOPS])
def test_loop_trains_as_one_process_with_the_joined_batch(found: Any, name: str) -> None:
    assert [one[name] for one in found] == [pytest.approx(0, abs=1e-12)] * 2


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = network(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def refusals() -> list[Any]:
    hvd.init()
    net = Spare()
    optimizer = distributed(torch.optim.SGD(net.parameters(), lr=0.1), net)

    def backward(number: int) -> None:
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        net(x).square().mean().backward()

    backward(hvd.rank())
    clip_grad_norm_(net.net.parameters(), 1e-3)  # of this rank's own gradients: not all ranks' are here
    with pytest.raises(AssertionError) as changed:
        optimizer.step()
    optimizer.zero_grad()
    backward(hvd.rank())
    optimizer.synchronize()
    norm = float(clip_grad_norm_(net.net.parameters(), 1e-3))
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    with pytest.raises(AssertionError) as in_place:
        optimizer.step()
    return [str(changed.value), str(in_place.value), norm, closures_by_the_own_loss()]


def closures_by_the_own_loss() -> str:
    """Let rank 0 end its step after one iteration of LBFGS, and rank 1 not."""
    net = network()
    optimizer = distributed(torch.optim.LBFGS(net.parameters(), max_iter=8), net)

    def closure() -> Any:
        optimizer.zero_grad()
        net(torch.ones(2, 5, dtype=torch.float64)).square().mean().backward()
        return float(hvd.rank() and net[0].weight.sum())

    with pytest.raises(PacelineError) as unlike:
        optimizer.step(closure)
    return str(unlike.value)


def test_gradients_that_no_rank_would_get_right_are_refused_with_the_way_out() -> None:
    first, second = run(refusals, 2)
    assert first == second
    changed, in_place, _, unlike = first
    assert "net.0." in changed or "net.2." in changed
    assert "spare.weight needs" in changed
    assert "optimizer.synchronize()" in changed
    assert "add_param_group" in in_place
    assert "rank 0 ended this step of the optimizer after 2 calls of the closure, and rank 1 calls it again" in unlike
    assert "return hvd.allreduce(loss.detach(), name='loss')" in unlike
