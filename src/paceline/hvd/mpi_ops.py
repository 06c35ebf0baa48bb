"""Horovod's module ``mpi_ops``: operations, ranks and sizes, as in ``from paceline.hvd.mpi_ops import rank, size``."""

from typing import TYPE_CHECKING

from paceline.hvd import basics, collectives, differentiable, process_sets
from paceline.hvd.basics import *  # noqa: F403 (each module lists its public names)
from paceline.hvd.collectives import *  # noqa: F403
from paceline.hvd.compression import Compression as Compression
from paceline.hvd.differentiable import *  # noqa: F403
from paceline.hvd.errors import HorovodInternalError as HorovodInternalError
from paceline.hvd.process_sets import *  # noqa: F403

if not TYPE_CHECKING:  # checkers read star imports, and no sum of lists
    __all__ = [*basics.__all__, *collectives.__all__, *differentiable.__all__, *process_sets.__all__]  # noqa: PLE0604
    __all__ += ["Compression", "HorovodInternalError"]
