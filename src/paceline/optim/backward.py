"""Watches backward passes: complete gradients, the end of the outermost pass, and whether a loop keeps the gradients.

| event of autograd                              | a pass inside another one? | callback                             |
|------------------------------------------------|----------------------------|--------------------------------------|
| a gradient arrives at a parameter              | any                        | ``starting(param)``                  |
| a gradient was added to ``param.grad``         | any                        | ``arrived(param)``                   |
| first of these in a pass                       | any                        | none; the end of the pass is queued  |
| end of a pass                                  | yes                        | none; the outer pass's end is queued |
| end of a pass                                  | no                         | ``ended()``                          |

Autograd has one thread per device, so ``arrived`` runs under a lock. One optimizer at a time watches a parameter.

A parameter keeps its watch alive, and so the optimizer, also after a loop has dropped that. The garbage collector does
not see which objects the hooks hold that run after a gradient was added, so these hold the watch weakly, and the table
of the parameter's other hooks holds it: a net and its optimizers are freed together.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from paceline.layout.tensors import without_graph
from paceline.torch_hooks.untraced import untraced

#: The watch of each parameter: one at a time, so that the first optimizer stops pushing when a model is wrapped again.
#: The parameter keeps the watch alive; this table holds both weakly.
_watches: MutableMapping[torch.nn.Parameter, weakref.ref[BackwardWatch]] = WeakIdKeyDictionary()

engine = torch.autograd.Variable._execution_engine


@untraced
class BackwardWatch:
    """Calls functions for every gradient that backward has completed, and at the end of each backward pass.

    They run inside ``backward()``: it raises their errors, and returns after them. Autograd records nothing of what
    ``arrived`` and ``ended`` do. A pass inside another one (``torch.utils.checkpoint`` with ``use_reentrant=True``) is
    part of the outer one.

    Args:
        arrived: called with a parameter whose ``grad`` is complete, in the thread that computed it.
        ended: called when the outermost pass has ended, if a watched parameter took part.
        starting: called with a parameter before its new gradient is added to ``grad``.
    """

    def __init__(
        self,
        arrived: Callable[[torch.nn.Parameter], None],
        ended: Callable[[], None],
        starting: Callable[[torch.nn.Parameter], None] | None = None,
    ) -> None:
        self._arrived, self._ended, self._starting = arrived, ended, starting
        # Autograd has one thread per device.
        self._lock = threading.RLock()
        self._queued: set[int] = set()
        self._handles: dict[torch.nn.Parameter, list[Any]] = {}
        self._hook = _weakly(weakref.WeakMethod(self._on_gradient))

    def watch(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Watch parameters, also those that need no gradient yet. An earlier watch of them ends."""
        for param in params:
            former = _watch_of(param)
            if former is not None:
                former.unwatch([param])
            _watches[param] = weakref.ref(self)
            needed = param.requires_grad
            param.requires_grad_(True)  # torch needs it to add hooks; they stay when it is reset
            handles = [param.register_post_accumulate_grad_hook(self._hook)]  # type: ignore[no-untyped-call]
            _table_of(param).watch = self
            if self._starting is not None:
                handles.append(param.register_hook(partial(self._on_start, param)))  # type: ignore[no-untyped-call]
            self._handles[param] = handles
            param.requires_grad_(needed)

    def unwatch(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Stop watching these parameters."""
        for param in params:
            for handle in self._handles.pop(param, ()):
                handle.remove()
            if _watch_of(param) is self:
                del _watches[param]
                _table_of(param).watch = None

    def close(self) -> None:
        """Stop watching."""
        self.unwatch(list(self._handles))

    @property
    def is_watching(self) -> bool:
        """Whether any parameter is watched: no later optimizer has taken over all of them."""
        return bool(self._handles)

    def watches(self, param: torch.nn.Parameter) -> bool:
        """Return whether a parameter is watched: no later optimizer has taken it over."""
        return param in self._handles

    def is_last(self, param: torch.nn.Parameter) -> bool:
        """Return whether no hook that was registered later may change the gradient after ``arrived``."""
        newest: int = next(reversed(param._post_accumulate_grad_hooks))
        return newest == self._handles[param][0].id  # type: ignore[no-any-return]

    @without_graph
    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        with self._lock:
            if torch._C._current_graph_task_id() not in self._queued:
                self._queue()
            self._arrived(param)

    def _on_start(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        assert self._starting is not None
        self._starting(param)

    def _queue(self, *_: Any) -> None:
        """Queue :meth:`_on_end` for the end of the running pass."""
        task = torch._C._current_graph_task_id()
        if task not in self._queued:
            self._queued.add(task)
            engine.queue_callback(self._on_end)

    @without_graph
    def _on_end(self) -> None:
        outer = _enclosing_function()
        if outer is not None:
            # Autograd calls this hook when the node is done, which is inside the outer pass.
            outer.register_hook(self._queue)
            return
        self._queued.clear()
        self._ended()


def is_watched(param: torch.nn.Parameter) -> bool:
    """Return whether a DistributedOptimizer trains this parameter."""
    return _watch_of(param) is not None


def _weakly(method: weakref.WeakMethod[Callable[[torch.nn.Parameter], None]]) -> Callable[[torch.nn.Parameter], None]:
    @untraced
    def call(param: torch.nn.Parameter) -> None:
        known = method()
        if known is not None:
            known(param)

    return call


def _table_of(param: torch.nn.Parameter) -> Any:
    """Return a parameter's table of hooks that run before a gradient is added: an object that can have attributes."""
    if param._backward_hooks is None:  # it stays when the parameter needs no gradient later
        param.register_hook(lambda grad: None).remove()  # type: ignore[no-untyped-call]
    return param._backward_hooks


def _watch_of(param: torch.nn.Parameter) -> BackwardWatch | None:
    found = _watches.get(param)
    return None if found is None else found()


def _enclosing_function() -> Any:
    """Return the autograd function whose backward has started this pass; None in an outermost pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_apply = code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__
        if is_apply and "self" in frame.f_locals:  # the other method of this name runs a function's forward
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


# ---- gradients after a pass ------------------------------------------------------------------------------------------


class KeptGradients:
    """The gradients of parameters as they are now: the tensors, held weakly, and torch's counts of their changes."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self._seen: list[tuple[torch.nn.Parameter, weakref.ref[torch.Tensor] | None, int]] = []
        for param in params:
            grad = param.grad
            self._seen.append((param, None, 0) if grad is None else (param, weakref.ref(grad), grad._version))

    def are_unchanged(self) -> bool:
        """Return whether each parameter has the same gradient as then, or none as then."""
        for param, seen, version in self._seen:
            grad = param.grad
            if (seen is None) != (grad is None) or (seen is not None and not _is_same(grad, seen, version)):
                return False
        return True

    def are_dropped(self, arrived: torch.nn.Parameter) -> bool:
        """Return whether all of them were set to None or to zeros, as ``model.zero_grad()`` does.

        Only the parameter ``arrived`` has got a gradient since.
        """
        changed, others = [], 0
        for param, seen, version in self._seen:
            if seen is None or param is arrived:
                continue
            grad, others = param.grad, others + 1
            if grad is not None and _is_same(grad, seen, version):
                return False
            if grad is not None:
                changed.append(grad)
        if not others:
            return any(
                param is arrived and seen is not None and _is_new(arrived, seen) for param, seen, _ in self._seen
            )
        return not any(bool((one._values() if one.is_sparse else one).any()) for one in changed)


def _is_same(grad: torch.Tensor | None, seen: weakref.ref[torch.Tensor], version: int) -> bool:
    return grad is not None and seen() is grad and grad._version == version


def _is_new(param: torch.nn.Parameter, seen: weakref.ref[torch.Tensor]) -> bool:
    """Return whether autograd has put a gradient where there was none, instead of adding to the one that was seen."""
    grad = param.grad
    return grad is not None and seen() is not grad and grad._version == 0 and grad.grad_fn is None
