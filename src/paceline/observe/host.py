"""Figures of Linux about this process and its host, as far as they are there without root.

| figure | file |
|---|---|
| ``busy``, ``queued``: the thread that trains has run, was ready to run | ``/proc/self/task/TID/schedstat`` |
| ``throttled``: the process's cgroup, or one above, had used up its quota | ``cpu.stat`` of cgroup version 2 or 1 |
| ``stolen``: other guests ran on the processors of this one | ``/proc/stat`` |
| ``stalled``: processes of this cgroup or host waited for memory | ``memory.pressure``, ``/proc/pressure/memory`` |
| ``faults``: pages were read from disk | ``getrusage`` |
| ``stopped``: no thread of this process ran, and none waited for a processor | the interval of two calls |

A figure that the host does not have stays 0.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

from paceline.observe.account import BUSY, INTERVAL, QUEUED, THROTTLED

#: An interval this much longer than the shortest one, in microseconds, is one in which the process did not run.
_LONG_US = 400_000

_CGROUPS = Path("/sys/fs/cgroup")


class HostFigures:
    """Reads the figures since the last call.

    Args:
        thread: native id of the thread that trains.
        cgroups: where cgroups are mounted.
        clock: seconds.
    """

    def __init__(self, thread: int, cgroups: Path = _CGROUPS, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedstat = f"/proc/self/task/{thread}/schedstat"
        self._quotas, self._pressure = _cpu_stats(cgroups), _memory_pressure(cgroups)
        self._clock = clock
        self._shortest = 2**62
        self._queued_here = 0
        self._last = self._totals()

    def read(self) -> list[int]:
        """Return the figures in the order of :data:`FIGURES`."""
        totals = self._totals()
        found = [max(0, now - before) for now, before in zip(totals, self._last, strict=True)]
        self._last = totals
        interval = found[INTERVAL]
        self._shortest = min(self._shortest, max(interval, 1))
        found[THROTTLED] = min(found[THROTTLED], interval)  # it is counted for each processor
        queued_here, before = self._queue_of_this_thread(), self._queued_here
        self._queued_here = queued_here
        lost = interval - self._shortest - (queued_here - before)
        idle = interval - found[BUSY] - found[QUEUED] - found[THROTTLED]
        return [*found, max(0, min(lost, idle)) if lost > _LONG_US else 0]

    def _queue_of_this_thread(self) -> int:
        found = _numbers("/proc/thread-self/schedstat", r"\d+ (\d+)")
        return found[0] // 1000 if found else 0

    def _totals(self) -> list[int]:
        busy, queued = _numbers(self._schedstat, r"(\d+) (\d+)") or (0, 0)
        throttled = 0
        for path in self._quotas:
            micro = _numbers(path, r"throttled_usec (\d+)")
            nano = _numbers(path, r"throttled_time (\d+)")
            throttled = max(throttled, micro[0] if micro else nano[0] // 1000 if nano else 0)
        stolen = _numbers("/proc/stat", r"cpu +(?:\d+ ){7}(\d+)")
        stalled = _numbers(self._pressure, r"some .*total=(\d+)")
        ticks = 1_000_000 // (os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return [
            round(1e6 * self._clock()), busy // 1000, queued // 1000, throttled, (stolen[0] if stolen else 0) * ticks,
            stalled[0] if stalled else 0, faults,
        ]  # fmt: skip


def _numbers(path: str | Path, pattern: str) -> tuple[int, ...]:
    """Return the numbers of the first match in a file; none where there is no such file or text."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = re.search(pattern, file.read(4096).decode(errors="replace"))
    except OSError:
        return ()
    return tuple(map(int, found.groups())) if found else ()


def _own_cgroups() -> dict[str, str]:
    """Return the path of this process's cgroup by controller; version 2 has the controller ``""``."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {name: path for _, names, path in parts for name in names.split(",")}


def _cpu_stats(cgroups: Path) -> list[Path]:
    """Return the files that tell of a quota of this process: those of its cgroup and of all above."""
    own = _own_cgroups()
    found = []
    for root, path in ((cgroups, own.get("", "/")), (cgroups / "cpu", own.get("cpu", "/"))):
        inner = Path(path.lstrip("/"))
        found += [root / one / "cpu.stat" for one in (inner, *inner.parents)]
    return [path for path in dict.fromkeys(found) if _numbers(path, r"throttled_(?:usec|time) (\d+)")]


def _memory_pressure(cgroups: Path) -> Path:
    own = cgroups / _own_cgroups().get("", "/").lstrip("/") / "memory.pressure"
    return own if own.exists() else Path("/proc/pressure/memory")
