"""Gradients that are NaN or Inf: quick checks, and texts of errors. Pure."""

from __future__ import annotations

import cmath
from collections.abc import Sequence

import torch

WAY_OUT = "lower the learning rate, clip gradients, or set on_nan='skip' (skips such steps) or 'pass'"


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether there is no NaN and no Inf."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return sums_up(values) or bool(values.isfinite().all())


def sums_up(tensor: torch.Tensor) -> bool:
    """Return whether the sum is finite: one quick pass. False proves nothing: the sum may be too large."""
    values = tensor._values() if tensor.is_sparse else tensor
    return cmath.isfinite(values.sum(dtype=torch.float32 if values.itemsize < 4 else None).item())


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones."""
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
