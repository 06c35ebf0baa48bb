"""Adasum (Maleki et al. 2021): adds gradients less where they point the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

#: Squared norms below this count as zero (Horovod's limit).
_TINY = math.sqrt(2.2250738585072014e-308)


def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine the ranks' tensors in pairs of ranks, then in pairs of pairs, and so on.

    Args:
        parts: one tensor per rank, a power of 2 of them.

    Returns:
        A new tensor, in the work precision: float64 for float64, else float32.
    """
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    level = [part.to(wide) for part in parts]
    while len(level) > 1:
        level = [_pair(level[one], level[one + 1]) for one in range(0, len(level), 2)]
    return level[0]


def _pair(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    a, b = one.double(), other.double()
    dot, a2, b2 = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    alpha = 1.0 if a2 < _TINY else 1.0 - dot / (2 * a2)
    beta = 1.0 if b2 < _TINY else 1.0 - dot / (2 * b2)
    return (alpha * a + beta * b).to(one.dtype)
