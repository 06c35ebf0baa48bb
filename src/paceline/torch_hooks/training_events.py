"""Events of a training loop that may know nothing of paceline: its first loader, backward passes and optimizer steps.

| event | seen by |
|---|---|
| a ``DataLoader`` begins to be walked | ``DataLoader.__iter__``, which is replaced |
| a backward pass begins | ``torch.autograd.backward``, which is replaced |
| an optimizer has stepped | torch's hooks of all optimizers |

What is replaced calls the original, and is put back when nobody listens any more; a hook of optimizers stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from paceline.torch_hooks.untraced import untraced


class Listener(Protocol):
    """It is called in the thread in which an event happens."""

    def loader_begins(self, iterator: Any) -> None:
        """A loader begins to be walked, by this iterator."""

    def pass_begins(self, losses: Any) -> None:
        """A backward pass begins, from these tensors: one, or several."""

    def stepped(self) -> None:
        """An optimizer has stepped."""


class TrainingEvents:
    """Tells a listener of all events of this process, until :meth:`close`."""

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener
        self._backward, self._iterate = torch.autograd.backward, DataLoader.__iter__
        self._new_backward, self._new_iterate = _before(self._backward, self._pass_begins), self._iterating()
        torch.autograd.backward = self._new_backward
        DataLoader.__iter__ = self._new_iterate  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Stop. Others may have replaced the same functions since: then ours stay under theirs, and do nothing.

        So does the hook of optimizers: torch may be walking its hooks now, in this thread or another one.
        """
        self._listener = None
        if torch.autograd.backward is self._new_backward:
            torch.autograd.backward = self._backward
        if DataLoader.__iter__ is self._new_iterate:
            DataLoader.__iter__ = self._iterate  # type: ignore[method-assign]

    def _pass_begins(self, losses: Any) -> None:
        if self._listener is not None:
            self._listener.pass_begins(losses)

    def _iterating(self) -> Callable[[DataLoader[Any]], Any]:
        original = self._iterate

        @functools.wraps(original)
        def iterate(loader: DataLoader[Any]) -> Any:
            iterator = original(loader)
            if self._listener is not None:
                self._listener.loader_begins(iterator)
            return iterator

        return iterate

    def _stepped(self, optimizer: object, args: Any, kwargs: Any) -> None:
        if self._listener is not None and not torch.compiler.is_compiling():
            self._listener.stepped()


def _before(original: Callable[..., None], note: Callable[[Any], None]) -> Callable[..., None]:
    @untraced
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        note(tensors)
        original(tensors, *args, **kwargs)

    return backward
