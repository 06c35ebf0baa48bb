"""The settings that the environment names, and which rank of how many this process is.

Variables of Horovod's autotuner, and of its launcher's own rendezvous, change nothing here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.collectives.errors import STORE, Interface
from paceline.collectives.negotiation.messages import NegotiationSettings
from paceline.errors import ConfigError

#: Largest number of a variable.
_MOST = 1e15


@dataclass(frozen=True)
class HvdSettings:
    """Settings of one process. Those of rank 0 count for negotiation and fusion."""

    fusion_threshold_bytes: int = 128 * 1024 * 1024
    """Most bytes that are fused; 0: no fusion."""
    cycle_time_s: float = 0.001
    """How long requests are collected while no thread waits for them."""
    hierarchical: bool = True
    """Reduce inside each host first, where a job has several hosts."""
    dynamic_process_sets: bool = False
    """Whether process sets can be added and removed."""
    timeout_s: float = 30.0
    """Longest time that one operation may take once all ranks are ready."""
    start_timeout_s: float = 60.0
    """How long ``init`` waits for all ranks."""
    timeline: str = ""
    """File of the timeline, or ``DYNAMIC``."""
    timeline_mark_cycles: bool = False
    interface: Interface = STORE
    """By what this process has joined."""
    options: NegotiationSettings = field(default_factory=NegotiationSettings)
    """The settings of the negotiation machine."""


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise ConfigError(f"{name}={text!r:.100} is not a number") from None
    if not 0 <= value <= _MOST:
        raise ConfigError(f"{name}={text!r:.100} is not a number from 0 to {_MOST:g}")
    return value


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "")
    return text.lower() not in ("0", "false", "no", "off") if text else default


def read_settings() -> HvdSettings:
    """Return the settings of this process.

    Raises:
        ConfigError: a variable is not a number, or the time of a stall's end does not exceed that of its warning.
    """
    usual = HvdSettings()
    warning_s = _number("HOROVOD_STALL_CHECK_TIME_SECONDS", usual.options.stall_warning_s)
    shutdown_s = _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", usual.options.stall_shutdown_s)
    if 0 < shutdown_s <= warning_s:
        raise ConfigError("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS must exceed HOROVOD_STALL_CHECK_TIME_SECONDS")
    if _flag("HOROVOD_STALL_CHECK_DISABLE", False):
        warning_s = shutdown_s = 0.0
    capacity = int(_number("HOROVOD_CACHE_CAPACITY", usual.options.cache_capacity))
    return HvdSettings(
        fusion_threshold_bytes=int(_number("HOROVOD_FUSION_THRESHOLD", usual.fusion_threshold_bytes)),
        cycle_time_s=_number("HOROVOD_CYCLE_TIME", 1000 * usual.cycle_time_s) / 1000,
        hierarchical=_flag("HOROVOD_HIERARCHICAL_ALLREDUCE", usual.hierarchical),
        dynamic_process_sets=_flag("HOROVOD_DYNAMIC_PROCESS_SETS", usual.dynamic_process_sets),
        timeout_s=_number("HOROVOD_GLOO_TIMEOUT_SECONDS", usual.timeout_s),
        start_timeout_s=_number("HOROVOD_START_TIMEOUT", usual.start_timeout_s),
        timeline=os.environ.get("HOROVOD_TIMELINE", usual.timeline),
        timeline_mark_cycles=_flag("HOROVOD_TIMELINE_MARK_CYCLES", usual.timeline_mark_cycles),
        options=NegotiationSettings(capacity, warning_s, shutdown_s),
    )


# ---- place -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessPlace:
    """A process among those that were started together.

    Attributes:
        rank: its rank.
        size: number of processes.
        local_size: number of processes on this host; 0: not known.
        job: the same in all processes of the job, and in no other job of this user on this host.
        is_whole: it is among all processes of the job, not some that ``init`` was given.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 0
    job: str = ""
    is_whole: bool = True

    @property
    def on_one_host(self) -> bool:
        """Whether all processes are known to be on this host."""
        return self.local_size == self.size

    def among(self, ranks: Sequence[int]) -> ProcessPlace:
        """Return the place among some ranks only.

        Raises:
            ValueError: ranks that do not exist, twice the same, or without this process.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ValueError(f"comm={list(ranks)!r} must name different ranks from 0 to {self.size - 1}")
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not in comm={list(ranks)!r}; only those ranks may call init")
        if list(ranks) == list(range(self.size)):
            return self
        size = len(ranks)
        return replace(
            self,
            rank=list(ranks).index(self.rank),
            size=size,
            local_size=size if self.on_one_host else 0,
            job=f"{self.job}|ranks {list(ranks)}",
            is_whole=False,
        )


def ranks_of(given: Any, what: str) -> list[int]:
    """Return ranks that are given as such, or by a communicator of mpi4py, all of whose members call this.

    Raises:
        ValueError: neither.
    """
    if hasattr(given, "Get_rank"):
        given = given.allgather(find_place().rank)
    if not isinstance(given, Iterable):
        raise ValueError(f"{what} is a list of ranks or a communicator of mpi4py, not {type(given).__name__}")
    return [int(rank) for rank in given]


#: Names of rank, size and local size, by what sets them; the first that are there count.
_SOURCES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, paceline launch
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PACELINE_RANK", "PACELINE_NUM_WORKERS", ""),  # paceline launch --no-torchrun-env
)

#: Variables that differ between jobs; each launcher sets some.
_JOB_NAMES = (
    "PACELINE_JOB_ID", "HOROVOD_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR",
    "MASTER_PORT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "HYDI_CONTROL_FD", "PMI_PORT",
)  # fmt: skip


def find_place(env: Mapping[str, str] | None = None) -> ProcessPlace:
    """Return this process's place; rank 0 of 1 where no launcher set anything.

    Raises:
        ConfigError: the variables are no numbers, or make no sense.
    """
    env = os.environ if env is None else env
    for names in _SOURCES:
        if env.get(names[0], "") != "" and env.get(names[1], "") != "":
            try:
                rank, size, local_size = (int(env.get(name) or 0) for name in names)
            except ValueError:
                raise ConfigError(f"{names[0]} and {names[1]} are not numbers") from None
            if not 0 <= rank < size:
                raise ConfigError(f"{names[0]}={rank} and {names[1]}={size}: a rank is less than the number of ranks")
            return ProcessPlace(rank, size, local_size, "|".join(env.get(name, "") for name in _JOB_NAMES))
    return ProcessPlace(local_size=1)
