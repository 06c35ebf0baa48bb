"""Clipping by the global norm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch


@torch.no_grad()
def clip_global_norm(arrays: Sequence[torch.Tensor], max_norm: float, check_isfinite: bool = True) -> float:
    """Scale tensors in place so that the 2-norm of all of them together is at most ``max_norm``.

    With a ``Trainer`` it belongs between ``allreduce_grads`` and ``update``, once per device.

    Args:
        arrays: tensors, on any devices.
        max_norm: the largest allowed norm.
        check_isfinite: warn when the norm is NaN or infinite. The tensors are then left as they are.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: no tensors, or ``max_norm`` is not above 0.
    """
    if not arrays:
        raise ValueError("there are no arrays to clip")
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in arrays:
        by_device.setdefault(one.device, []).append(one.detach())
    norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group))) for group in by_device.values()]
    norm = math.hypot(*(float(one) for one in norms))
    if not math.isfinite(norm):
        if check_isfinite:
            warnings.warn(f"the norm of the gradients is {norm}: nothing was clipped", stacklevel=2)
        return norm
    scale = max_norm / (norm + 1e-8)
    if scale < 1.0:
        for group in by_device.values():
            torch._foreach_mul_(group, scale)
    return norm
