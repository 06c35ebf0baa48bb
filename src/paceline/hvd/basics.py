"""``init``, ``shutdown``, ranks and sizes, and what this build can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives import world
from paceline.collectives.errors import HVD
from paceline.collectives.planes.torch_group import nccl_is_available
from paceline.collectives.process_sets import ProcessSet, enter, unregister
from paceline.collectives.world import is_initialized
from paceline.worker import alone

__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip


def init(comm: Any = None, process_sets: str | Iterable[Any] | None = None) -> None:
    """Join the job. All ranks call it. A second call changes nothing.

    Args:
        comm: ranks that make the job (the others do not call it), or a communicator of mpi4py; None: all.
        process_sets: process sets, alike on all ranks; ``"dynamic"``: sets may be added and removed later.

    Raises:
        ValueError: two sets are alike, one is empty, or has ranks that do not exist.
        JoinTimeoutError: not all ranks called it within HOROVOD_START_TIMEOUT seconds.
        HorovodInternalError: ranks gave different sets.
        ConfigError: a variable of the environment is wrong, or ranks on several hosts have no key.
    """
    dynamic = isinstance(process_sets, str)
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets={process_sets!r} is neither 'dynamic' nor a list of process sets")
        process_sets = None
    sets = [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in process_sets or ()]
    enter(HVD, comm, sets, dynamic=dynamic)
    alone.note_store("hvd")


def shutdown() -> None:
    """End the job for all ranks. Operations that are pending on any rank fail. ``init`` can be called again."""
    world.leave()
    unregister()


def rank() -> int:
    """Return the rank of this process.

    Raises:
        ValueError: ``init`` has not been called. So do the other functions below.
    """
    return world.current().rank


def size() -> int:
    """Return the number of processes."""
    return world.current().size


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return world.current().local_rank


def local_size() -> int:
    """Return the number of processes of this host."""
    return world.current().local_size


def cross_rank() -> int:
    """Return the number of this host among those that have this local rank."""
    return world.current().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return world.current().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    return world.current().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline from now on, in rank 0; see :mod:`paceline.collectives.timeline`.

    Raises:
        ValueError: HOROVOD_TIMELINE is not DYNAMIC.
    """
    _check_dynamic_timeline()
    if world.current().rank == 0:
        world.current().base.timeline.open(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline.

    Raises:
        ValueError: HOROVOD_TIMELINE is not DYNAMIC.
    """
    _check_dynamic_timeline()
    world.current().base.timeline.close()


def _check_dynamic_timeline() -> None:
    if world.current().hvd.timeline.upper() != world.DYNAMIC:
        raise ValueError("set HOROVOD_TIMELINE=DYNAMIC to start and stop timelines")


def mpi_built() -> bool:
    """Return False: tensors never go over MPI, DDL or oneCCL."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built


def gloo_built() -> bool:
    """Return whether torch has Gloo."""
    return bool(dist.is_gloo_available())


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return NCCL's version as a number; 0 without NCCL."""
    if not nccl_is_available():
        return 0
    numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return numbers[0] * 10000 + numbers[1] * 100 + numbers[2]


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None
