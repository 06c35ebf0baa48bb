"""An optimizer's state of one flat tensor, cut in parts and made one again.

What is kept per element is a 1-D tensor; tensors of no dimension and numbers hold for all elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def part(state: Mapping[str, Any], where: slice | None) -> dict[str, Any]:
    """Return the state of some elements: views of what is kept per element, copies of the rest.

    Args:
        state: of all of them.
        where: the elements; None: all, with copies of everything, whatever its shape.
    """
    return {name: _part(one, where) if isinstance(one, torch.Tensor) else one for name, one in state.items()}


def _part(one: torch.Tensor, where: slice | None) -> torch.Tensor:
    return one.clone() if where is None or one.dim() == 0 else one[where]


def fit(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Tell whether two states can be those of parts of one tensor: they agree in what holds for all elements."""
    return left.keys() == right.keys() and all(_fits(one, right[name]) for name, one in left.items())


def _fits(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dim() == other.dim() and (one.dim() > 0 or torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def as_one(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of two neighbouring parts that fit."""
    return {
        name: tensor_as_one(one, right[name]) if isinstance(one, torch.Tensor) and one.dim() else one
        for name, one in left.items()
    }


def tensor_as_one(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return two flat tensors as one: a view where they lie side by side, else a copy."""
    end = left.storage_offset() + left.numel()
    same_memory = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    if not same_memory or right.storage_offset() != end or not (left.is_contiguous() and right.is_contiguous()):
        return torch.cat((left, right))
    return left.as_strided((left.numel() + right.numel(),), (1,))
