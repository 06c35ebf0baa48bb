"""Base class of optimizers that are written as the formula of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

State = dict[str, Any]
Group = dict[str, Any]


class Formula(torch.optim.Optimizer):
    """A torch optimizer that is defined by its formula for one tensor.

    A subclass lists its options in ``__init__``, passes them to this class, and defines :meth:`_update`. Its name must
    be added to ``classes.py``. State that does not exist yet counts as zeros, so it can be loaded range by range.

    Raises:
        ValueError: a negative rate, or a momentum outside of [0, 1).
    """

    per_key: ClassVar[bool] = False
    """Whether a step depends on the key. Then every group holds one key (``key``), or a range of a key from element
    ``key_start`` on."""

    def __init__(self, params: Any, defaults: Group) -> None:
        lr, momentum = defaults.get("lr", 0.0), defaults.get("momentum", 0.0)
        if not lr >= 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"{type(self).__name__} needs lr >= 0 and 0 <= momentum < 1, not lr={lr}, momentum={momentum}"
            )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        """Update one tensor and its state (tensors in its shape or of no dimension) in place, but not the gradient."""
        raise NotImplementedError


def buffer(state: State, name: str, param: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the state, zeros at first."""
    if name not in state:
        state[name] = torch.zeros_like(param)
    found: torch.Tensor = state[name]
    return found


def decayed(grad: torch.Tensor, param: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the gradient with L2 regularisation: ``grad + weight_decay * param``."""
    decay = group["weight_decay"]
    return grad.add(param, alpha=decay) if decay else grad
