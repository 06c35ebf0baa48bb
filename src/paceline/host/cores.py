"""The processors of this host: how many this process may use, and the threads of a server."""

from __future__ import annotations

import os

#: Most threads of a server whose number is not set.
MAX_THREADS = 8


def usable_cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_of(cores: int, members: int) -> int:
    """Return the number of threads of a server on a host.

    Updates are limited by the speed of memory, which a few threads use up.
    """
    return max(1, min(MAX_THREADS, cores // max(1, members)))
