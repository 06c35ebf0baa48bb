"""Which state of an optimizer is one number for all elements of a key."""

from __future__ import annotations

import pytest
import torch

from paceline.updaters.classes import ELEMENTWISE, ROWS_ONLY, WHOLE_TENSOR
from paceline.updaters.state_parts import COUNTERS


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE_TENSOR, *ROWS_ONLY])
def test_counters_of_every_optimizer_are_known(name: str) -> None:
    """State of no dimensions belongs to a parameter of no dimensions, if it does not have the name of a counter."""
    cls = (ELEMENTWISE | WHOLE_TENSOR | ROWS_ONLY)[name]
    param = torch.nn.Parameter(torch.ones(3, 2))
    param.grad = torch.ones(3, 2).to_sparse(1) if name in ROWS_ONLY else torch.ones(3, 2)
    optimizer = cls([param])
    optimizer.param_groups[0].update({"momentum": 0.5} if "momentum" in optimizer.defaults else {})
    optimizer.step()
    state = {key: torch.as_tensor(one) for key, one in optimizer.state[param].items()}
    assert {key for key, one in state.items() if one.dim() == 0} <= COUNTERS
    assert not {key for key, one in state.items() if one.dim()} & COUNTERS
