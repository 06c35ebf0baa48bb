"""Clipping of merged gradients: on devices, in a store of this process, and on servers.

Where servers step, they clip if they merge pushes; else every worker clips before its push.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore


@torch.no_grad()
def clip_global_norm(arrays: Sequence[torch.Tensor], max_norm: float, check_isfinite: bool = True) -> float:
    """Scale tensors in place so that the 2-norm of all of them together is at most ``max_norm``.

    With a ``Trainer``, call it between ``allreduce_grads`` and ``update``, once per device.

    Args:
        arrays: tensors, on any devices.
        max_norm: the largest allowed norm.
        check_isfinite: warn when the norm is NaN or infinite. Then the tensors are not changed.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: no tensors, or ``max_norm`` is not above 0.
    """
    if not arrays:
        raise ValueError("there are no arrays to clip")
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")
    norm = global_norm(arrays)
    if not math.isfinite(norm):
        if check_isfinite:
            warnings.warn(f"the norm of the gradients is {norm}: nothing was clipped", stacklevel=2)
        return norm
    scale = max_norm / (norm + 1e-8)
    if scale < 1.0:
        for one in arrays:
            (one if one.is_sparse else one.detach()).mul_(scale)
    return norm


@torch.no_grad()
def global_norm(arrays: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all tensors together. Repeated rows of row-sparse tensors are summed first."""
    return float(torch.nn.utils.get_total_norm([_elements(one) for one in arrays]))


@dataclass(frozen=True)
class GradientClip:
    """Clips merged gradients as ``torch.nn.utils`` does: first every element, then the norm of all together.

    Attributes:
        norm: largest norm of all parameters' gradients together.
        value: largest absolute value of an element.

    Raises:
        ValueError: a bound that is not above 0.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, bound in (("clip_grad_norm", self.norm), ("clip_grad_value", self.value)):
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} is {bound}; it must be above 0")

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None

    @torch.no_grad()
    def __call__(self, merged: Sequence[torch.Tensor], scale: float) -> float:
        """Clip gradients that are ``scale * merged``.

        Args:
            merged: all gradients; their elements are clamped in place. Row-sparse ones have no repeated rows.
            scale: factor that turns them into gradients.

        Returns:
            The factor to use instead of ``scale``.
        """
        if self.value is not None and scale:
            bound = self.value / abs(scale)
            torch._foreach_clamp_min_(elements := [_elements(one) for one in merged], -bound)
            torch._foreach_clamp_max_(elements, bound)
        if self.norm is None or not merged:
            return scale
        # As torch.nn.utils.clip_grad_norm_: a norm that is NaN makes every gradient NaN.
        factor = self.norm / (global_norm(merged) * abs(scale) + 1e-6)
        return scale if factor >= 1.0 else scale * factor


def _elements(one: torch.Tensor) -> torch.Tensor:
    """Return the stored elements. The elements of a row-sparse tensor without repeated rows share its memory."""
    return one.detach().coalesce().values() if one.is_sparse else one.detach()


def servers_norm(clip: GradientClip, store: KVStoreBase | None, rows: bool) -> float:
    """Return the largest norm that a store's servers clip to; 0: it has no servers, or the workers clip.

    Raises:
        ValueError: servers cannot clip this way.
    """
    if clip.norm is None or not isinstance(store, DistStore) or not store.policy.merges_rounds:
        return 0.0
    if clip.value is not None:
        raise ValueError(
            f"clip_grad_norm and clip_grad_value together: servers of a {store.type} store would take the norm before "
            "the values are clamped. Give one of them, or let the workers update, which dist_sync with dense gradients "
            "does: update_on_kvstore=False"
        )
    if rows and store.policy.merge == "groups":
        raise ValueError(
            f"clip_grad_norm in a {store.type} store needs dense gradients: use sparse=False for embeddings"
        )
    return clip.norm
