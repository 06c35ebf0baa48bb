"""Tells listeners the losses of each outermost backward pass, before the pass frees their graph."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.torch_hooks.untraced import untraced

Losses = Sequence[torch.Tensor]
Listener = Callable[[Losses], None]

#: Autograd's number of the backward pass that runs, where none does.
_NO_PASS = -1

#: Attribute of a ``torch.autograd.backward`` that tells the listeners.
_TELLS = "_paceline_tells"

#: Methods that are called with the losses of every backward pass. They are held weakly, and leave when they end.
_listeners: list[weakref.WeakMethod[Listener]] = []


def tell_losses(listener: Listener) -> None:
    """Let a method be called with the losses of every outermost backward pass, before it."""
    if not hasattr(torch.autograd.backward, _TELLS):
        torch.autograd.backward = _telling(torch.autograd.backward)
        setattr(torch.autograd.backward, _TELLS, True)
    _listeners.append(weakref.WeakMethod(listener, _listeners.remove))


def _telling(original: Callable[..., None]) -> Callable[..., None]:
    @untraced
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _listeners and torch._C._current_graph_task_id() == _NO_PASS:
            given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            losses = [one for one in given if isinstance(one, torch.Tensor)]
            for listener in list(_listeners):
                call = listener()
                if call is not None:
                    call(losses)
        original(tensors, *args, **kwargs)

    return backward
