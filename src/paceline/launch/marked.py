"""The processes of jobs on this host, known by their environment: what a lost launcher or agent has left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline import config
from paceline.errors import LaunchError
from paceline.launch.runtime import birth

_PROC = Path("/proc")
_TRIES, _PAUSE_S = 100, 0.05


@dataclass(frozen=True)
class MarkedProcess:
    """A process whose environment names a job."""

    pid: int
    uid: int
    job: str
    role: str
    rank: str
    born: int
    """When it began, in the kernel's clock ticks: process ids come again."""
    age_s: float
    command: str


def marked(job_id: str = "", proc: Path = _PROC) -> list[MarkedProcess]:
    """Return the processes of a job, or of all jobs, as far as this user may see them; not this process.

    Args:
        job_id: of the job; empty: of every job.
        proc: the kernel's view of the processes.
    """
    found = []
    for path in sorted((one for one in proc.iterdir() if one.name.isdigit()), key=lambda one: int(one.name)):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or belongs to somebody else
            process = _read(path, float((proc / "uptime").read_text().split()[0]))
            if process.job and job_id in ("", process.job) and process.pid != os.getpid():
                found.append(process)
    return found


def kill(processes: Iterable[MarkedProcess]) -> None:
    """Kill processes, and what they start meanwhile.

    Raises:
        LaunchError: some are left.
    """
    left = list(processes)
    meant = {(one.job, one.uid) for one in left}
    for _ in range(_TRIES):
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if birth(one.pid) == str(one.born):
                    os.kill(one.pid, signal.SIGKILL)
        left = [one for one in marked() if (one.job, one.uid) in meant]
        if not left:
            return
        time.sleep(_PAUSE_S)
    raise LaunchError(f"processes {', '.join(str(one.pid) for one in left)} cannot be killed")


def _read(path: Path, uptime_s: float) -> MarkedProcess:
    """Return a process; its job is empty if it belongs to none, or has ended and waits for its parent."""
    pairs = (one.partition("=") for one in (path / "environ").read_bytes().decode(errors="replace").split("\0"))
    environ = {name: value for name, _, value in pairs}
    stat = (path / "stat").read_text(errors="replace")
    uids = next(line for line in (path / "status").read_text(errors="replace").splitlines() if line.startswith("Uid:"))
    born = int(stat[stat.rindex(")") + 2 :].split()[19])
    return MarkedProcess(
        pid=int(path.name),
        uid=int(uids.split()[2]),
        job=environ.get(config.variable("job_id"), ""),
        role=environ.get(config.variable("role"), ""),
        rank=environ.get(config.variable("rank"), ""),
        born=born,
        age_s=uptime_s - born / os.sysconf("SC_CLK_TCK"),
        command=(path / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip(),
    )
