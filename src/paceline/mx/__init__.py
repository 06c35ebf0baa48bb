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
    from paceline.mx import autograd, callback, context, gluon, init, io, lr_scheduler, metric, optimizer
    from paceline.mx import init as initializer
    from paceline.mx import module as mod
    from paceline.mx import module as module
    from paceline.mx.context import Context, cpu, gpu, num_gpus

#: Modules whose names here are not their own.
_RENAMED = {
    "initializer": "paceline.mx.init",
    "kv": "paceline.kvstore",
    "kvstore": "paceline.kvstore",
    "mod": "paceline.mx.module",
}

__all__ = [
    "Context",
    "autograd",
    "callback",
    "context",
    "cpu",
    "gluon",
    "gpu",
    "init",
    "initializer",
    "io",
    "kv",
    "kvstore",
    "lr_scheduler",
    "metric",
    "mod",
    "module",
    "num_gpus",
    "optimizer",
]

#: What to use for names of MXNet's that are not here.
_INSTEAD = {
    "current_context": "cpu() or gpu(0)",
    "image": "PIL or torchvision",
    "model": "mx.mod.Module, with save_checkpoint and load",
    "mon": "hooks of torch.nn.Module, or --monitor of the examples",
    "monitor": "hooks of torch.nn.Module, or --monitor of the examples",
    "nd": "torch, whose tensors are the arrays",
    "np": "torch, whose tensors are the arrays",
    "npx": "torch.nn.functional",
    "profiler": "torch.profiler",
    "random": "torch.manual_seed",
    "recordio": "paceline.data.Records and RecordWriter",
    "rnn": "torch.nn.LSTM and its like",
    "sym": "a torch.nn.Module",
    "symbol": "a torch.nn.Module",
    "test_utils": "paceline.data.digits for get_mnist, range(mx.num_gpus()) for list_gpus",
    "visualization": "print(net), or torch.utils.tensorboard",
    "viz": "print(net), or torch.utils.tensorboard",
}

if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _absent = absent(__name__, __all__, _INSTEAD)

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            return _absent(name)
        if name in ("Context", "cpu", "gpu", "num_gpus"):
            return getattr(importlib.import_module("paceline.mx.context"), name)
        return importlib.import_module(_RENAMED.get(name, f"paceline.mx.{name}"))


def __dir__() -> list[str]:
    return __all__
