"""Tells listeners the losses of each outermost backward pass, before it begins.

``torch.autograd.backward`` is replaced once, and calls the original. A listener is held weakly.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.torch_hooks.untraced import untraced

Losses = Sequence[torch.Tensor]
Listener = Callable[[Losses], None]

#: Autograd's number of the backward pass that runs, where none does.
_NO_PASS = -1

#: Attribute of a ``torch.autograd.backward`` that tells the listeners.
_TELLS = "_paceline_tells"

#: Losses that are added up at most: a loop may go backward often, and take no step.
_MOST_ADDED = 64

#: Steps whose losses are read: the first ones, and those after a new size; up to the last one of all.
_FIRST, _AFTER_NEW_SIZE, _LAST = 32, 8, 512

#: Methods that are called with the losses of every backward pass.
_listeners: list[weakref.WeakMethod[Listener]] = []


def tell_losses(listener: Listener) -> weakref.WeakMethod[Listener]:
    """Let a method be called with the losses of every outermost backward pass, as long as its object lives.

    Returns:
        The method's entry among the listeners.
    """
    if not hasattr(torch.autograd.backward, _TELLS):
        torch.autograd.backward = _telling(torch.autograd.backward)
        setattr(torch.autograd.backward, _TELLS, True)
    entry = weakref.WeakMethod(listener, _forget)
    _listeners.append(entry)
    return entry


def _forget(entry: weakref.WeakMethod[Listener]) -> None:
    if entry in _listeners:
        _listeners.remove(entry)


def _telling(original: Callable[..., None]) -> Callable[..., None]:
    @untraced
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _listeners and torch._C._current_graph_task_id() == _NO_PASS:
            tensors = tuple(tensors) if isinstance(tensors, Iterator) else tensors
            given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            losses = [one for one in given if isinstance(one, torch.Tensor)]
            for listener in list(_listeners):
                call = listener()
                if call is not None:
                    call(losses)
        original(tensors, *args, **kwargs)

    return backward


class HeardLosses:
    """The losses of the backward passes of some steps: the first ones, and some after each new size of a batch.

    To read a loss waits for its device, so it is done only where batches of different size are to be compared.
    """

    def __init__(self) -> None:
        self._losses: deque[torch.Tensor] = deque(maxlen=_MOST_ADDED)
        self._are_numbers = True
        self._sizes: set[float] = set()
        self._steps, self._due = 0, _FIRST
        self._told = tell_losses(self._note)

    @property
    def have_ended(self) -> bool:
        """Whether no further step is told."""
        return self._steps >= _LAST

    def _note(self, losses: Losses) -> None:
        for one in losses:
            if one.numel() == 1 and not one.is_complex():
                self._losses.append(one.detach())
            else:
                self._are_numbers = False

    def take(self, size: float) -> float | None:
        """Return the sum of the losses of a step; None: it is not to be compared, not known, or not finite."""
        losses, are_numbers = list(self._losses), self._are_numbers
        self.forget()
        self._steps += 1
        if size not in self._sizes:
            self._sizes.add(size)
            self._due = max(self._due, _AFTER_NEW_SIZE)
        if self.have_ended:
            _forget(self._told)
        if not (losses and are_numbers and self._due and self._steps <= _LAST):
            return None
        self._due -= 1
        total = sum(one.item() for one in losses)
        return total if math.isfinite(total) else None

    def forget(self) -> None:
        """Forget the losses since the last step."""
        self._losses.clear()
        self._are_numbers = True
