"""Figures of Linux about this process and its host, as far as they are there without root.

| figure | file |
|---|---|
| ``busy``, ``queued``: the thread that trains has run, was ready to run | ``/proc/self/task/TID/schedstat`` |
| ``throttled``: the process's cgroup, or one above, had used up its quota | ``cpu.stat`` of cgroup version 2 or 1 |
| ``stolen``: other guests ran on the processors of this one | ``/proc/stat`` |
| ``stalled``: processes of this cgroup or host waited for memory | ``memory.pressure``, ``/proc/pressure/memory`` |
| ``faults``: pages were read from disk | ``getrusage`` |
| ``reread``: the kernel had taken pages away from this cgroup, and read them again | ``memory.stat`` |
| ``stopped``: see :class:`Stops` | a thread that sleeps |

A figure that the host does not have stays 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.observe.account import INTERVAL, THROTTLED

#: Seconds for which :class:`Stops` sleeps, and the shortest stop that it counts.
_SLEEP_S, _LEAST_STOP_S = 0.25, 0.3

#: Longest wait for the end of its thread, which may read a file of the kernel.
_END_S = 1.0

_CGROUPS = Path("/sys/fs/cgroup")

#: Pages of a cgroup that came back after they were taken away, of programs and of files.
_REREAD = r"workingset_refault_anon (\d+)\nworkingset_refault_file (\d+)"

#: Nanoseconds for which each thread has run, and for which it was ready to run; and seconds for which this process
#: waited otherwise.
HeldUp = tuple[dict[str, int], dict[str, int], float]


class Stops:
    """Counts the time in which the kernel let no thread of this process run: SIGSTOP, a debugger, a frozen cgroup.

    A thread sleeps again and again. Where it wakes late, it takes off everything else that may have held it up: a
    thread that ran and kept Python's lock, waits of all threads for a processor, an exhausted CPU quota, and waits of
    the host for a disk or for memory. The rest is a stop. So a process that is short of anything is not stopped, and
    one that is short of much may be stopped and not be called so.
    """

    def __init__(self, quotas: list[Path]) -> None:
        self._quotas = quotas
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-stops", daemon=True)
        self.seconds = 0.0

    def start(self) -> None:
        """Begin to watch. Idempotent, and nothing after :meth:`close`."""
        if self._thread.ident is None and not self._done.is_set():
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        before, asleep = self._held_up(), time.monotonic()
        while not self._done.wait(_SLEEP_S):
            late_s, now = time.monotonic() - asleep - _SLEEP_S, self._held_up()
            self.seconds += stop_of(late_s, before, now)
            before, asleep = now, time.monotonic()

    def _held_up(self) -> HeldUp:
        ran, queued = {}, {}
        with contextlib.suppress(OSError):
            for thread in os.listdir("/proc/self/task"):
                found = _numbers(f"/proc/self/task/{thread}/schedstat", r"(\d+) (\d+)")
                if found:
                    ran[thread], queued[thread] = found
        others = throttled_us(self._quotas)
        for file in ("/proc/pressure/io", "/proc/pressure/memory"):
            others += sum(_numbers(file, r"some .*total=(\d+)"))
        return ran, queued, 1e-6 * others


def stop_of(late_s: float, before: HeldUp, now: HeldUp) -> float:
    """Return how much of a late wake-up nothing else explains, by the figures before and after the sleep."""
    if late_s < _LEAST_STOP_S or not now[0]:  # without figures of its threads it may have been short of anything
        return 0.0
    ran_s = max(1e-9 * (new - before[0].get(thread, 0)) for thread, new in now[0].items())
    queued_s = sum(1e-9 * (new - before[1].get(thread, 0)) for thread, new in now[1].items())
    rest = late_s - max(0.0, ran_s - _SLEEP_S) - queued_s - (now[2] - before[2])
    return rest if rest >= _LEAST_STOP_S else 0.0


class HostFigures:
    """Reads the figures since the last call."""

    def __init__(self, thread: int, cgroups: Path = _CGROUPS, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedstat = f"/proc/self/task/{thread}/schedstat"
        self._quotas = list(_of_cgroups(cgroups, "cpu", "cpu.stat", r"throttled_(?:usec|time) (\d+)"))
        own = cgroups / _own_cgroups().get("", "/").lstrip("/") / "memory.pressure"
        self._pressure = own if own.exists() else Path("/proc/pressure/memory")
        self._memory = next(_of_cgroups(cgroups, "memory", "memory.stat", _REREAD), Path(os.devnull))
        self.stops = Stops(self._quotas)
        self._clock = clock
        self._last = self._totals()

    def read(self) -> list[int]:
        """Return the figures in the order of :data:`FIGURES`."""
        totals = self._totals()
        found = [max(0, now - before) for now, before in zip(totals, self._last, strict=True)]
        self._last = totals
        found[THROTTLED] = min(found[THROTTLED], found[INTERVAL])  # it is counted for each processor
        return found

    def _totals(self) -> list[int]:
        busy, queued = _numbers(self._schedstat, r"(\d+) (\d+)") or (0, 0)
        stolen = _numbers("/proc/stat", r"cpu +(?:\d+ ){7}(\d+)")
        stalled = _numbers(self._pressure, r"some .*total=(\d+)")
        ticks = 1_000_000 // (os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return [
            round(1e6 * self._clock()), busy // 1000, queued // 1000, throttled_us(self._quotas),
            (stolen[0] if stolen else 0) * ticks, stalled[0] if stalled else 0, faults, round(1e6 * self.stops.seconds),
            sum(_numbers(self._memory, _REREAD)),
        ]  # fmt: skip


def throttled_us(quotas: list[Path]) -> int:
    """Return the microseconds for which the most limited of some cgroups had used up its quota."""
    found = [0]
    for path in quotas:
        micro, nano = _numbers(path, r"throttled_usec (\d+)"), _numbers(path, r"throttled_time (\d+)")
        found += micro or (one // 1000 for one in nano)
    return max(found)


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


def _of_cgroups(cgroups: Path, controller: str, name: str, pattern: str) -> Iterator[Path]:
    """Return the files of this name that have such numbers, of this process's cgroup and of all above."""
    own, found = _own_cgroups(), []
    for root, path in ((cgroups, own.get("", "/")), (cgroups / controller, own.get(controller, "/"))):
        inner = Path(path.lstrip("/"))
        found += [root / one / name for one in (inner, *inner.parents)]
    return (path for path in dict.fromkeys(found) if _numbers(path, pattern))
