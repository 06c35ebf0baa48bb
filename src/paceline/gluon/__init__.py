"""Replicas of one model on several devices of one process, in the manner of MXNet's Gluon and Module."""

from paceline.gluon.backward import backward
from paceline.gluon.clip import clip_global_norm
from paceline.gluon.parameter import Parameter, ParameterDict
from paceline.gluon.placement import as_in_context
from paceline.gluon.replicate import ReplicatedModule, replicate
from paceline.gluon.split import split_and_load, split_data, work_load_sizes
from paceline.gluon.sync_batch_norm import SyncBatchNorm
from paceline.gluon.trainer import Trainer

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
