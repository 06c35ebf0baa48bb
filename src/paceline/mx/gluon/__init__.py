"""Replicas of one model on several devices of one process, in the manner of MXNet's Gluon and Module."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.mx.context import as_in_context
from paceline.mx.gluon import data, loss, nn, utils
from paceline.mx.gluon.clip import clip_global_norm
from paceline.mx.gluon.parallel import backward
from paceline.mx.gluon.parameter import Parameter, ParameterDict
from paceline.mx.gluon.replicate import ReplicatedModule, replicate
from paceline.mx.gluon.sync_batch_norm import SyncBatchNorm
from paceline.mx.gluon.trainer import Trainer
from paceline.mx.gluon.utils import split_and_load, split_data, work_load_sizes
from paceline.naming import absent

__all__ = [
    "Parameter",
    "ParameterDict",
    "ReplicatedModule",
    "SyncBatchNorm",
    "Trainer",
    "as_in_context",
    "backward",
    "clip_global_norm",
    "data",
    "loss",
    "nn",
    "replicate",
    "split_and_load",
    "split_data",
    "utils",
    "work_load_sizes",
]


#: What to use for names of MXNet's that are not here.
_INSTEAD = {
    "Block": "torch.nn.Module",
    "Constant": "a buffer of a torch.nn.Module",
    "HybridBlock": "torch.nn.Module",
    "model_zoo": "torchvision.models, or the models of the examples",
    "rnn": "torch.nn.LSTM, GRU and RNN",
    "SymbolBlock": "torch.nn.Module",
    "contrib": "torch.nn",
    "probability": "torch.distributions",
}

if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _absent = absent(__name__, __all__, _INSTEAD)

    def __getattr__(name: str) -> Any:
        if name in ("autograd", "metric"):
            return importlib.import_module(f"paceline.mx.{name}")
        return _absent(name)
