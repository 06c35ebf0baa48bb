"""Splits and joins an optimizer's state of one flat tensor.

State per element is a 1-D tensor. 0-d tensors and numbers apply to all elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: State of registered optimizers that is one number for all elements of a key: the rest has an entry per element.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


def part(state: Mapping[str, Any], where: slice | None) -> dict[str, Any]:
    """Return the state of some elements: views of state per element, copies of other state; None: copies of all."""
    return {name: _part(one, where) if isinstance(one, torch.Tensor) else one for name, one in state.items()}


def _part(one: torch.Tensor, where: slice | None) -> torch.Tensor:
    return one.clone() if where is None or one.dim() == 0 else one[where]


def fit(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether two states can be joined: their state for all elements is equal."""
    return left.keys() == right.keys() and all(_fits(one, right[name]) for name, one in left.items())


def _fits(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dim() == other.dim() and (one.dim() > 0 or torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def as_one(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return the joined state of two adjacent parts for which :func:`fit` is True."""
    return {
        name: tensor_as_one(one, right[name]) if isinstance(one, torch.Tensor) and one.dim() else one
        for name, one in left.items()
    }


def tensor_as_one(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return two flat tensors as one: a view if they are adjacent in memory, else a copy."""
    end = left.storage_offset() + left.numel()
    same_memory = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    if not same_memory or right.storage_offset() != end or not (left.is_contiguous() and right.is_contiguous()):
        return torch.cat((left, right))
    return left.as_strided((left.numel() + right.numel(),), (1,))
