"""What values can be copied into."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from paceline import DistributedOptimizer
from paceline.errors import PacelineError
from paceline.optim.binding import Bound, same_bits, take_all
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
    with pytest.raises(PacelineError, match=r"float32 .*convert the model .*before that, or close .* make a new one"):
        net(torch.ones(3, 2, dtype=dtype)).sum().backward()
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
