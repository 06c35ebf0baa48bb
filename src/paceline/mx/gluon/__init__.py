"""Replicas of one model on several devices of one process, in the manner of MXNet's Gluon and Module."""

from paceline.mx.gluon.backward import backward
from paceline.mx.gluon.clip import clip_global_norm
from paceline.mx.gluon.parameter import Parameter, ParameterDict
from paceline.mx.gluon.placement import as_in_context
from paceline.mx.gluon.replicate import ReplicatedModule, replicate
from paceline.mx.gluon.sync_batch_norm import SyncBatchNorm
from paceline.mx.gluon.trainer import Trainer
from paceline.mx.gluon.utils import split_and_load, split_data, work_load_sizes

__all__ = [
    "Parameter",
    "ParameterDict",
    "ReplicatedModule",
    "SyncBatchNorm",
    "Trainer",
    "as_in_context",
    "backward",
    "clip_global_norm",
    "replicate",
    "split_and_load",
    "split_data",
    "work_load_sizes",
]
