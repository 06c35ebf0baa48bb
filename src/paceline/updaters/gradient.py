"""Options of the merged gradient that every updater has, as in MXNet: they apply before the optimizer.

``gradient = clip(rescale_grad * merged, -clip_gradient, clip_gradient)``; weight decay is added after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: Names of these options, beside the optimizer's in every param group. Torch ignores them.
GRADIENT_OPTIONS = frozenset({"rescale_grad", "clip_gradient"})


def without(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without the gradient's: the optimizer's own."""
    return {name: value for name, value in options.items() if name not in GRADIENT_OPTIONS}


def factor_of(options: Mapping[str, Any]) -> float:
    """Return the factor on the merged gradient."""
    return float(options.get("rescale_grad", 1.0))


def clip_of(options: Mapping[str, Any]) -> float | None:
    """Return the largest absolute value of an element; None: no limit."""
    clip = options.get("clip_gradient")
    return None if clip is None else float(clip)


def check(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check the options of the gradient.

    Raises:
        TypeError: an option is not a number.
        ValueError: a limit is not above 0, or a factor is not finite.
    """
    for group in groups:
        for name in GRADIENT_OPTIONS & group.keys():
            value = group[name]
            if name == "clip_gradient" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is {value!r}, not a number")
            if name == "clip_gradient" and not value > 0:
                raise ValueError(f"clip_gradient is {value}, but a limit must be above 0; None turns it off")
            if not abs(value) < float("inf"):
                raise ValueError(f"{name} is {value}, not a finite number")


def prepared(
    grads: list[torch.Tensor], options: Mapping[str, Any], scale: float = 1.0, *, ours: bool = True
) -> list[torch.Tensor]:
    """Return the gradients of merged pushes of one param group, scaled by ``rescale_grad`` and ``scale``, and clipped.

    Unless they are ``ours``, and may be overwritten, the results are new tensors if they differ.
    """
    factor, clip = scale * factor_of(options), clip_of(options)
    if not grads or (factor == 1.0 and clip is None):
        return grads
    if not ours:
        grads = [grad * factor for grad in grads]
    elif factor != 1.0:
        torch._foreach_mul_(grads, factor)
    if clip is not None:
        torch._foreach_clamp_min_(grads, -clip)
        torch._foreach_clamp_max_(grads, clip)
    return grads
