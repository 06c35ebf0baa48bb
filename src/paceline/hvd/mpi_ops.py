"""Horovod's module ``mpi_ops``: operations, ranks and sizes, as in ``from paceline.hvd.mpi_ops import rank, size``."""

from typing import TYPE_CHECKING

from paceline.collectives import operations as collectives
from paceline.collectives import process_sets
from paceline.collectives.operations import *  # noqa: F403
from paceline.collectives.process_sets import *  # noqa: F403
from paceline.hvd import basics, verbs
from paceline.hvd.basics import *  # noqa: F403 (each module lists its public names)
from paceline.hvd.compression import Compression as Compression
from paceline.hvd.errors import HorovodInternalError as HorovodInternalError
from paceline.hvd.verbs import *  # noqa: F403

if not TYPE_CHECKING:  # checkers read star imports, and no sum of lists
    __all__ = [*basics.__all__, *collectives.__all__, *verbs.__all__, *process_sets.__all__]  # noqa: PLE0604
    __all__ += ["Compression", "HorovodInternalError"]
