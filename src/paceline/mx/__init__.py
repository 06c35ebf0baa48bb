"""MXNet's spellings of what paceline has: ``from paceline import mx`` for ``import mxnet as mx``.

Names are imported on first use. A name of MXNet's that is not here is an AttributeError that says what to use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.naming import absent

if TYPE_CHECKING:
    from paceline import kvstore as kv
    from paceline import kvstore as kvstore
    from paceline.mx import autograd, callback, context, gluon, metric, optimizer
    from paceline.mx import module as mod
    from paceline.mx import module as module
    from paceline.mx.context import Context, cpu, gpu, num_gpus

_MODULES = {"kv": "paceline.kvstore", "kvstore": "paceline.kvstore", "mod": "paceline.mx.module"} | {
    name: f"paceline.mx.{name}"
    for name in ("autograd", "callback", "context", "gluon", "metric", "module", "optimizer")
}

__all__ = [
    "Context",
    "autograd",
    "callback",
    "context",
    "cpu",
    "gluon",
    "gpu",
    "kv",
    "kvstore",
    "metric",
    "mod",
    "module",
    "num_gpus",
    "optimizer",
]

#: What to use for names of MXNet's that are not here.
_INSTEAD = {
    "init": "torch.nn.init",
    "initializer": "torch.nn.init",
    "io": "paceline.data or torch.utils.data",
    "lr_scheduler": "the option lr_scheduler, a function of the number of the update, or torch.optim.lr_scheduler",
    "model": "mx.mod.Module, with save_checkpoint and load",
    "nd": "torch, whose tensors are the arrays",
    "np": "torch, whose tensors are the arrays",
    "npx": "torch.nn.functional",
    "profiler": "torch.profiler",
    "random": "torch.manual_seed",
    "recordio": "torch.utils.data",
    "sym": "a torch.nn.Module",
    "symbol": "a torch.nn.Module",
}

if not TYPE_CHECKING:  # a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name in __all__:
            return getattr(importlib.import_module("paceline.mx.context"), name)
        raise absent("paceline.mx", name, __all__, _INSTEAD)


def __dir__() -> list[str]:
    return __all__
