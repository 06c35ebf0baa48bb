"""What values can be copied into."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import pytest
import torch

from paceline import DistributedOptimizer
from paceline.errors import PacelineError
from paceline.optim.binding import Bound, all_finite, same_bits, take_all
from paceline.optim.device import other_bits
from paceline.testing.one_process import OneProcess


@pytest.mark.parametrize(
    "grad",
    [
        None,
        torch.zeros(1).expand(2, 3),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(3, 2).t(),
    ],
)
def test_merged_gradients_come_whatever_was_there(grad: torch.Tensor | None) -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    param.grad = grad
    value = torch.arange(6.0).view(2, 3)
    with torch.no_grad():
        take_all([Bound("x", param, None, 0, (), value, torch.zeros(2, 3))], weights=False)  # type: ignore[arg-type]
    assert param.grad is not None
    assert torch.equal(param.grad, value)


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_model_that_is_converted_later_is_refused_with_the_way_out(
    update: Literal["worker", "server"], dtype: torch.dtype
) -> None:
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), store, model=net, update=update)
    net.to(dtype)
    train = (lambda: net(torch.ones(3, 2, dtype=dtype)).sum().backward(), optimizer.step)
    with pytest.raises(PacelineError, match=r"float32 .*convert the model .*before that, or close .* make a new one"):
        [one() for one in train]
    optimizer.close()
    again = DistributedOptimizer(optimizer.inner, store.sibling("again"), model=net, update=update)
    net(torch.ones(3, 2, dtype=dtype)).sum().backward()
    again.step()
    assert net.weight.dtype == dtype


def test_merged_gradients_come_where_a_conjugate_was() -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
    param.grad = torch.ones(2, dtype=torch.cfloat).conj()
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with torch.no_grad():
        take_all([Bound("x", param, None, 0, (), value, torch.zeros(2, 2))], weights=False)  # type: ignore[arg-type]
    assert param.grad.tolist() == [1 + 2j, 3 + 4j]


def test_same_bits_are_those_of_the_elements_in_any_layout() -> None:
    one = torch.arange(24.0).reshape(2, 3, 4)
    one[0, 0, 0] = torch.nan
    turned = one.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert same_bits(one, turned)
    turned[1, 2, 3] += 1
    assert not same_bits(one, turned)
    assert not same_bits(one, one.double())
    assert not same_bits(one, one[:1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(2, 3, 4, 5)),
        (torch.zeros(4, dtype=torch.bfloat16), torch.full((4,), -0.0, dtype=torch.bfloat16)),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.arange(3), torch.arange(3).flip(0)),
        (torch.zeros(2, dtype=torch.cdouble), torch.tensor([0, 1j], dtype=torch.cdouble)),
    ],
)
def test_device_compares_bits_as_the_host_does(one: torch.Tensor, other: torch.Tensor) -> None:
    assert other_bits(one, other).item()
    assert not other_bits(one, one.clone(memory_format=torch.contiguous_format)).item()
    assert not same_bits(one, other)


def test_tensors_without_elements_have_the_same_bits() -> None:
    assert not other_bits(torch.empty(0, 3), torch.empty(0, 3)).item()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_gradients_that_a_loop_drops_are_freed(update: Literal["worker", "server"]) -> None:
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), store, model=net, update=update)
    net(torch.ones(3, 2)).sum().backward()
    gradients: list[Any] = [weakref.ref(one.grad) for one in net.parameters()]  # type: ignore[arg-type]
    optimizer.step()
    optimizer.zero_grad()
    assert [one() for one in gradients] == [None, None]


@pytest.mark.parametrize(
    ("values", "are_finite"),
    [
        ([], True),
        ([torch.ones(3), torch.zeros(2, dtype=torch.bfloat16)], True),
        ([torch.full((3,), 3e38), torch.ones(2)], True),
        ([torch.ones(3), torch.tensor([torch.inf])], False),
        ([torch.ones(3), torch.tensor([torch.nan, 1.0]).to_sparse()], False),
    ],
)
def test_gradients_are_finite_if_all_elements_are(values: list[torch.Tensor], are_finite: bool) -> None:
    assert all_finite(values) is are_finite


def test_gradients_of_another_type_are_refused_at_once() -> None:
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1).to(torch.bfloat16)
    net.bias.grad_dtype = torch.float32
    with pytest.raises(ValueError, match=r"'bias' is torch\.bfloat16 with grad_dtype torch\.float32, .*leave grad_"):
        DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), store, model=net)
