"""The losses of backward passes are told before each pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from paceline.torch_hooks import losses
from paceline.torch_hooks.losses import HeardLosses, Losses, tell_losses


class Listener:
    def __init__(self) -> None:
        self.heard: list[Losses] = []

    def hear(self, one: Losses) -> None:
        self.heard.append(one)


@pytest.fixture(autouse=True)
def _nobody_listens_at_the_end() -> Iterator[None]:
    before = list(losses._listeners)
    yield
    gc.collect()
    assert losses._listeners == before


def test_losses_of_outermost_passes_are_told() -> None:
    listener, net, inputs = Listener(), torch.nn.Linear(4, 3), torch.rand(6, 4, requires_grad=True)
    tell_losses(listener.hear)
    tell_losses(Listener().hear)  # has ended
    loss = checkpoint(net, inputs, use_reentrant=True).sum()  # its own pass runs inside of the other one
    loss.backward()
    other = net(inputs).sum()
    torch.autograd.backward(iter([other, net(inputs).sum()]))
    assert [[one is loss or one is other for one in heard] for heard in listener.heard] == [[True], [True, False]]
    again = Listener()
    tell_losses(again.hear)
    net(inputs).sum().backward()
    assert len(again.heard) == 1  # the function of torch is replaced once
    edge = get_gradient_edge(net(inputs).sum())
    assert isinstance(edge, GradientEdge)
    torch.autograd.backward(edge)
    assert again.heard[1:] == [[]]


def passes(*values: float) -> None:
    weight = torch.ones(1, requires_grad=True)
    for value in values:
        (weight * value).sum().backward()


def test_losses_of_the_first_steps_are_added_up() -> None:
    heard = HeardLosses()
    assert heard.take(3) is None
    passes(1.0, 2.0)
    assert heard.take(3) == 3.0
    passes(4.0)
    heard.forget()
    passes(5.0)
    assert heard.take(3) == 5.0


def test_what_is_no_number_or_not_finite_is_not_told() -> None:
    heard, weight = HeardLosses(), torch.ones(2, requires_grad=True)
    (weight * 2).backward(torch.ones(2))
    assert heard.take(3) is None
    passes(float("nan"))
    assert heard.take(3) is None
    passes(1.0)
    assert heard.take(3) == 1.0


def test_later_steps_are_told_after_a_new_size_and_in_the_end_nobody_listens() -> None:
    heard = HeardLosses()
    told = []
    for step in range(1, 600):
        passes(1.0)
        told.append(heard.take(4 if step < 100 or step >= 512 else 5) is not None)
    assert [step for step, one in enumerate(told, 1) if one] == [*range(1, 33), *range(100, 108)]
    assert heard._told not in losses._listeners


def test_a_loop_that_takes_no_step_keeps_few_losses() -> None:
    heard = HeardLosses()
    passes(*[1.0] * 100)
    assert heard.take(1) == 64.0
