"""Optimizers that wrap another one: some skip torch's constructor, or are no ``torch.optim.Optimizer`` at all."""

from __future__ import annotations

from collections import OrderedDict
from types import MethodType
from typing import Any

import torch


def check_wrappable(optimizer: Any) -> None:
    """Raise for an object that a DistributedOptimizer cannot wrap.

    Raises:
        TypeError: says to wrap the other way round, if the object wraps an optimizer.
    """
    name = type(optimizer).__name__
    is_ours = isinstance(optimizer, torch.optim.Optimizer)
    if is_ours and hasattr(optimizer, "defaults"):
        return
    what = f"{name} has no 'defaults', which torch's constructor sets" if is_ours else ""
    way_out = ""
    if hasattr(optimizer, "step") and hasattr(optimizer, "param_groups"):
        way_out = (
            f": wrap the other way round: {name}(DistributedOptimizer(...)), with the optimizer that it wraps inside"
        )
    raise TypeError(f"{what or f'{name} is not a torch.optim.Optimizer'}{way_out}")


def share_hooks(optimizer: torch.optim.Optimizer, wrapper: torch.optim.Optimizer) -> None:
    """Have all hooks of an optimizer in common with its wrapper: the hooks of both run, once."""
    for call in ("step", "state_dict", "load_state_dict"):
        for name in (f"_optimizer_{call}_pre_hooks", f"_optimizer_{call}_post_hooks"):
            if not hasattr(optimizer, name):
                setattr(optimizer, name, OrderedDict())
            setattr(wrapper, name, getattr(optimizer, name))
    step: Any = optimizer.step
    if not getattr(step, "hooked", False):
        hooked: Any = torch.optim.Optimizer.profile_hook_step(step.__func__)
        hooked.hooked = True
        # Only this object's: others of its class may have no tables of hooks.
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
