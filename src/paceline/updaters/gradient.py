"""Options of the merged gradient that every updater has, as in MXNet: they apply before the optimizer.

``gradient = clip(rescale_grad * merged, -clip_gradient, clip_gradient)``; weight decay is added after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: Names of these options, beside those of an optimizer in every param group. Torch ignores them.
GRADIENT_OPTIONS = frozenset({"rescale_grad", "clip_gradient"})


def without(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those of the gradient: the optimizer's own."""
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


def prepared(grad: torch.Tensor, options: Mapping[str, Any], scale: float = 1.0, *, ours: bool = True) -> torch.Tensor:
    """Return the gradient of a merged push, scaled and clipped.

    Args:
        grad: merged push, of any shape.
        options: options of its param group.
        scale: further factor, beside ``rescale_grad``.
        ours: ``grad`` may be overwritten; else the result is a new tensor if it differs from ``grad``.
    """
    factor, clip = scale * factor_of(options), clip_of(options)
    if factor != 1.0:
        grad, ours = (grad.mul_(factor) if ours else grad * factor), True
    if clip is not None:
        grad = grad.clamp_(-clip, clip) if ours else grad.clamp(-clip, clip)
    return grad
