"""``init``, ``shutdown``, ranks and sizes, and what this build can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

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

_T = TypeVar("_T")


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


def _of_job(name: str, kind: Callable[[Any], _T], text: str) -> Callable[[], _T]:
    """Return the function that tells a fact of the running job. It raises ValueError before ``init``."""

    def fact() -> _T:
        return kind(getattr(world.current(), name))

    fact.__name__ = fact.__qualname__ = name
    fact.__doc__ = f"{text}\n\nRaises:\n    ValueError: ``init`` has not been called."
    return fact


rank = _of_job("rank", int, "Return the rank of this process.")
size = _of_job("size", int, "Return the number of processes.")
local_rank = _of_job("local_rank", int, "Return the rank of this process among those of its host.")
local_size = _of_job("local_size", int, "Return the number of processes of this host.")
cross_rank = _of_job("cross_rank", int, "Return the number of this host among those that have this local rank.")
cross_size = _of_job("cross_size", int, "Return the number of hosts that have this local rank.")
is_homogeneous = _of_job("is_homogeneous", bool, "Return whether all hosts have the same number of processes.")


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
