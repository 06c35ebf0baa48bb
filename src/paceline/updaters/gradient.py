"""What is done to a merged gradient before any optimizer sees it: options that every updater has, as in MXNet.

``gradient = clip(rescale_grad * merged, -clip_gradient, clip_gradient)``; weight decay comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: Names of these options, beside those of an optimizer in every param group. Torch ignores them.
GRADIENT_OPTIONS = frozenset({"rescale_grad", "clip_gradient"})


def without(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are the optimizer's own."""
    return {name: value for name, value in options.items() if name not in GRADIENT_OPTIONS}


def factor_of(options: Mapping[str, Any]) -> float:
    """Return the factor on the merged gradient."""
    return float(options.get("rescale_grad", 1.0))


def clip_of(options: Mapping[str, Any]) -> float | None:
    """Return the largest absolute value that an element may have, None where there is no limit."""
    clip = options.get("clip_gradient")
    return None if clip is None else float(clip)


def check(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse values that make no sense.

    Raises:
        TypeError: not numbers.
        ValueError: a limit that is not above 0, or a factor that is not finite.
    """
    for group in groups:
        for name in GRADIENT_OPTIONS & group.keys():
            value = group[name]
            if name == "clip_gradient" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is {value!r}, not a number")
            if name == "clip_gradient" and not value > 0:
                raise ValueError(f"clip_gradient is {value}, but a limit is above 0; None turns it off")
            if not abs(value) < float("inf"):
                raise ValueError(f"{name} is {value}, not a finite number")


def prepared(grad: torch.Tensor, options: Mapping[str, Any], scale: float = 1.0, *, ours: bool = True) -> torch.Tensor:
    """Return the gradient that a merged push stands for.

    Args:
        grad: merged push, of any shape.
        options: of its param group.
        scale: factor on it, beside ``rescale_grad``.
        ours: it may be overwritten; else the result is elsewhere where it differs.
    """
    factor, clip = scale * factor_of(options), clip_of(options)
    if factor != 1.0:
        grad, ours = (grad.mul_(factor) if ours else grad * factor), True
    if clip is not None:
        grad = grad.clamp_(-clip, clip) if ours else grad.clamp(-clip, clip)
    return grad
