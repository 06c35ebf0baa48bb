"""MXNet's names of recording. torch records anyway, so an old script needs no change: see :func:`record`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from paceline.mx.gluon.parallel import backward
from paceline.naming import absent

__all__ = ["backward", "is_recording", "pause", "record"]


def record(train_mode: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context in which gradients are recorded, as they are outside of it.

    Whether layers such as dropout train is said by ``net.train()`` and ``net.eval()``, not here.

    Raises:
        ValueError: ``train_mode`` is False.
    """
    if not train_mode:
        raise ValueError("record(train_mode=False) is not possible: call net.eval(), and record()")
    return torch.enable_grad()


def pause() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no gradients are recorded."""
    return torch.no_grad()


def is_recording() -> bool:
    """Return whether gradients are recorded."""
    return torch.is_grad_enabled()


if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _INSTEAD = {
        "Function": "torch.autograd.Function",
        "grad": "torch.autograd.grad",
        "is_training": "net.training",
        "mark_variables": "tensor.requires_grad_()",
        "predict_mode": "net.eval()",
        "set_recording": "torch.set_grad_enabled",
        "train_mode": "net.train()",
    }
    __getattr__ = absent(__name__, __all__, _INSTEAD)
