"""The gradients of one moment, to see later whether a loop has left, changed or dropped them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


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
