"""Gradients that are NaN or Inf: quick checks, and what to say. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WAY_OUT = "lower the learning rate, clip gradients, or set on_nan='skip' (leave such steps out) or 'pass'"


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether there is no NaN and no Inf."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return sums_up(values) or bool(values.isfinite().all())


def sums_up(tensor: torch.Tensor) -> bool:
    """Tell whether the sum is finite: one quick pass, and no proof of the contrary (it may be too large)."""
    values = tensor._values() if tensor.is_sparse else tensor
    return bool(values.sum(dtype=torch.float32 if values.itemsize < 4 else None).isfinite())


def listed(names: Sequence[str]) -> str:
    """Name a few parameters, and say how many more there are."""
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
