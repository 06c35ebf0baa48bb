"""The Horovod interface over torch.distributed: ``import paceline.hvd as hvd`` in place of ``horovod.torch``.

Operations of different ranks are matched by name, in any order. Where ranks disagree, all of them get an exception.
"""

from typing import TYPE_CHECKING

from paceline.collectives.process_sets import process_set_ids as process_set_ids
from paceline.hvd import mpi_ops as mpi_ops
from paceline.hvd.compression import CodecCompression as CodecCompression
from paceline.hvd.compression import Compressor as Compressor
from paceline.hvd.functions import *  # noqa: F403 (each module lists its public names)
from paceline.hvd.functions import __all__ as _functions
from paceline.hvd.mpi_ops import *  # noqa: F403
from paceline.hvd.optimizer import DistributedOptimizer as DistributedOptimizer
from paceline.hvd.run import run as run
from paceline.hvd.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

if not TYPE_CHECKING:  # checkers read star imports, and no sum of lists
    __all__ = [*mpi_ops.__all__, *_functions, "CodecCompression", "Compressor", "DistributedOptimizer"]  # noqa: PLE0604
    __all__ += ["SyncBatchNorm", "mpi_ops", "process_set_ids", "run"]

    def __getattr__(name: str) -> object:
        text = f"module {__name__!r} has no attribute {name!r}"
        if name == "elastic":
            text += (
                ": the ranks of a job stay the same. Leave out hvd.elastic, and start the script with paceline launch "
                "--max-restarts: after a failure it starts again, and goes on from its checkpoint"
            )
        raise AttributeError(text)
