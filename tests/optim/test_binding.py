"""What values can be copied into."""

from __future__ import annotations

import pytest
import torch

from paceline.optim.binding import Bound, take_all


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
