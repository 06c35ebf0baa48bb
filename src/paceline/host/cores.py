"""The processors of this host: how many this process may use, and the threads of a server."""

from __future__ import annotations

import math
import os
from pathlib import Path

_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

#: Most threads of a server whose number is not set.
MAX_THREADS = 8


def usable_cores() -> int:
    """Return the number of processors that this process may use, and has the time of: a container may have less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(count, quota())))


def quota(own: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> float:
    """Return the processors whose time the control groups of this process may use; infinity where none has a limit.

    A group's limit counts for the processes in it. In a container the first folder is its own group's.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    found = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            above = groups / "cpu" if controllers else groups
            inner = above / path.lstrip("/")
            found += [_limit(folder) for folder in (inner, *inner.parents) if folder.is_relative_to(above)]
    return min(found)


def _limit(group: Path) -> float:
    """Return the limit of one group: of version 2, else of version 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota_us, period_us = " ".join((group / name).read_text() for name in names).split()
            return math.inf if quota_us in ("max", "-1") else int(quota_us) / int(period_us)
        except (OSError, ValueError):
            continue
    return math.inf


def share_of(cores: int, members: int) -> int:
    """Return the number of threads of a server on a host.

    Updates are limited by the speed of memory, which a few threads use up.
    """
    return max(1, min(MAX_THREADS, cores // max(1, members)))
