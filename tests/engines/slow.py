"""Slows a host down: a quota of CPU time for all that comes from one process."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

_CPU = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 100_000


def why_no_quota() -> str:
    """Return why CPU time cannot be limited here, for skipping tests; an empty text when it can."""
    if not os.access(_CPU / "cpu.cfs_quota_us", os.F_OK) and not os.access(_CPU / "cgroup.procs", os.W_OK):
        return "needs root and the cpu controller of cgroup v1"
    return ""


class Quota:
    """A limit of CPU time.

    Args:
        folder: of the cgroup.

    Attributes:
        folder: of the cgroup.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def throttled(self) -> int:
        """How often the processes had to wait."""
        words = (self.folder / "cpu.stat").read_text().split()
        return int(words[words.index("nr_throttled") + 1])


@contextlib.contextmanager
def quota(process: int, cpus: float) -> Iterator[Quota]:
    """Limit a process, its descendants, and all that they start from now on; within what the tests have themselves."""
    own = _own()
    folder = own / f"paceline-test-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * _PERIOD_US)))
        for one in _with_descendants(process):
            _move(one, folder)
        yield Quota(folder)
    finally:
        while left := (folder / "cgroup.procs").read_text().split():
            for one in left:
                _move(int(one), own)
        folder.rmdir()


def _own() -> Path:
    """Return the cgroup of this process."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(_CPU / path.lstrip("/") for _, names, path in lines if "cpu" in names.split(","))


def _move(process: int, folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        (folder / "cgroup.procs").write_text(str(process))


def _with_descendants(process: int) -> list[int]:
    found = [process]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found
