"""Memory, descriptors and threads of a process, from the kernel; and the line through such samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1024.0 * 1024.0


@dataclass(frozen=True)
class Sample:
    """What the kernel says of a process.

    Attributes:
        at_s: when.
        memory_bytes: memory of its own, and its share of shared memory (PSS): that counts once in a sum. Without mapped
            programs and libraries: its share of those depends on what else runs on this host.
        descriptors: see :func:`descriptors_of`.
        threads: of the process.
    """

    at_s: float
    memory_bytes: int
    descriptors: int
    threads: int


def sample(pid: int, at_s: float) -> Sample:
    """Look at a process.

    Raises:
        OSError: it has ended.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    memory = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return Sample(at_s, memory * 1024, descriptors_of(pid), len(os.listdir(f"/proc/{pid}/task")))


def descriptors_of(pid: int | str) -> int:
    """Return how many files a process has open, without its looks at the kernel's figures: threads look often."""
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += not os.readlink(path).startswith(("/proc/", "/sys/"))
        except FileNotFoundError:  # closed since it was listed
            continue
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line of least squares through points (x, y)."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@dataclass(frozen=True)
class Growth:
    """How a process grew.

    Attributes:
        mib_per_minute: of its memory.
        descriptors: more at the end than ever at the beginning; 0 if not.
        threads: the same of threads.
        at_end_mib: its memory at the end.
    """

    mib_per_minute: float
    descriptors: int
    threads: int
    at_end_mib: float


def growth(samples: Sequence[Sample]) -> Growth:
    """Return how a process grew over its samples."""
    line = slope([(one.at_s / 60, one.memory_bytes / MIB) for one in samples])
    third = max(1, len(samples) // 3)
    first, last = samples[:third], samples[-third:]
    return Growth(
        line,
        max(0, max(one.descriptors for one in last) - max(one.descriptors for one in first)),
        max(0, max(one.threads for one in last) - max(one.threads for one in first)),
        samples[-1].memory_bytes / MIB,
    )
