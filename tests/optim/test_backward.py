"""When a gradient is complete, and when a backward pass is over."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from paceline.optim.backward import BackwardWatch


class Log:
    """Notes what a watch says, by the names of parameters."""

    def __init__(self, net: torch.nn.Module) -> None:
        self._names = {param: name for name, param in net.named_parameters()}
        self.said: list[str] = []
        self.watch = BackwardWatch(self._arrived, lambda: self.said.append("end"))
        self.watch.watch(net.parameters())

    def _arrived(self, param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        self.said.append(self._names[param])


def new_net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 1, bias=False))


def test_end_comes_after_all_gradients_and_before_backward_returns() -> None:
    net = new_net()
    log = Log(net)
    for _ in range(2):
        net(torch.ones(2, 3)).sum().backward()
        log.said.append("returned")
    assert log.said == ["1.weight", "0.weight", "end", "returned"] * 2


def test_pass_without_watched_parameters_says_nothing() -> None:
    log = Log(new_net())
    torch.ones(3, requires_grad=True).sum().backward()
    assert log.said == []


def test_gradients_asked_for_are_not_accumulated_and_not_seen() -> None:
    net = new_net()
    log = Log(net)
    torch.autograd.grad(net(torch.ones(2, 3)).sum(), list(net.parameters()))
    assert log.said == []


@pytest.mark.parametrize("head", [True, False])
def test_checkpointed_segments_are_part_of_the_outer_pass(head: bool) -> None:
    net = new_net()
    log = Log(net)
    hidden = checkpoint(net[0], torch.ones(2, 3, requires_grad=True), use_reentrant=True)
    output = net[1](hidden) if head else checkpoint(net[1], hidden, use_reentrant=True)
    output.sum().backward()
    assert log.said == ["1.weight", "0.weight", "end"]


def test_parameter_frozen_at_first_is_seen_when_it_is_trained() -> None:
    net = new_net()
    net[0].requires_grad_(False)
    log = Log(net)
    assert not net[0].weight.requires_grad
    net(torch.ones(2, 3)).sum().backward()
    net[0].requires_grad_(True)
    net(torch.ones(2, 3)).sum().backward()
    assert log.said == ["1.weight", "end", "1.weight", "0.weight", "end"]


def test_errors_of_callbacks_are_raised_by_backward() -> None:
    net = new_net()

    def fail() -> None:
        raise ValueError("no")

    watch = BackwardWatch(lambda param: None, fail)
    watch.watch(net.parameters())
    with pytest.raises(ValueError, match="no"):
        net(torch.ones(2, 3)).sum().backward()


def test_parameters_are_watched_by_the_last_that_asked() -> None:
    net = new_net()
    first, second = Log(net), Log(net)
    net(torch.ones(2, 3)).sum().backward()
    assert first.said == []
    assert second.said == ["1.weight", "0.weight", "end"]
    second.watch.close()
    net(torch.ones(2, 3)).sum().backward()
    assert len(second.said) == 3


def test_start_is_told_before_a_gradient_is_added() -> None:
    net, said = new_net(), []

    def start(param: torch.nn.Parameter) -> None:
        said.append(None if param.grad is None else param.grad.clone())

    watch = BackwardWatch(lambda param: None, lambda: None, start)
    watch.watch([net[1].weight])
    for _ in range(2):
        net(torch.ones(2, 3)).sum().backward()
    assert said[0] is None
    assert torch.equal(said[1] * 2, net[1].weight.grad)


def test_models_are_freed_when_they_are_watched_no_more() -> None:
    net = new_net()
    Log(net).watch.close()
    alive = weakref.ref(net[0].weight)
    del net
    gc.collect()
    assert alive() is None


class BackwardFirst(torch.autograd.Function):
    """Goes backward in its forward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            layer(inputs.detach()).sum().backward()
        return inputs.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].expand(2, 3), None


def test_pass_in_a_forward_is_one_of_its_own() -> None:
    net = new_net()
    log = Log(net)
    BackwardFirst.apply(net[0](torch.ones(2, 3)), net[1]).backward()
    assert log.said == ["1.weight", "end", "0.weight", "end"]


def test_a_net_keeps_its_watch_alive_and_both_are_freed_together() -> None:
    net = new_net()
    log = Log(net)
    watch, said = weakref.ref(log.watch), log.said
    del log
    gc.collect()
    net(torch.ones(2, 3)).sum().backward()
    assert said == ["1.weight", "0.weight", "end"]
    del net
    gc.collect()
    assert watch() is None


def test_a_watch_that_another_one_replaces_is_freed() -> None:
    net = new_net()
    watch = weakref.ref(Log(net).watch)
    Log(net)
    gc.collect()
    assert watch() is None
