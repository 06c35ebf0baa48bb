"""The outer optimizer of asynchronous local steps."""

from __future__ import annotations

from typing import Any

import torch

from paceline.updaters.formula import Formula, Group, State, buffer


class DelayedNesterov(Formula):
    """SGD whose Nesterov momentum takes one step for N gradients (Liu et al. 2024, arXiv:2401.09135, with c = 0)::

        s = s + g
        w = w - lr * g / N
        at each N-th gradient: v = momentum * v + s / N; w = w - lr * momentum * v; s = 0

    With N workers that push one by one, ``every=N`` takes as much momentum as if they had pushed together. With
    ``every=1`` it is torch's SGD with ``nesterov=True``.

    Raises:
        ValueError: ``every`` is no integer, at least 1.
    """

    def __init__(self, params: Any, lr: float = 0.7, momentum: float = 0.9, every: int = 1) -> None:
        if every < 1 or every != int(every):
            raise ValueError(f"DelayedNesterov needs an integer number of gradients, at least 1, not every={every}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        every, total = group["every"], buffer(state, "sum", param)
        steps = state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
        steps += 1
        total.add_(grad)
        param.add_(grad, alpha=-group["lr"] / every)
        if int(steps) % every == 0:
            momentum = buffer(state, "momentum_buffer", param).mul_(group["momentum"]).add_(total, alpha=1 / every)
            param.add_(momentum, alpha=-group["lr"] * group["momentum"])
            total.zero_()
