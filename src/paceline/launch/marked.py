"""End the processes of jobs on this host by their environment: what a lost launcher or agent has left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_MARK = b"PACELINE_JOB_ID="
_TRIES, _PAUSE_S = 100, 0.05


def marked(job_id: str = "") -> dict[int, str]:
    """Return this user's processes that belong to a job (of this id), by process id: their job."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
                job = _job_of((process / "environ").read_bytes())
                if job and job_id in ("", job):
                    found[int(process.name)] = job
    return found


def kill_marked(job_id: str = "") -> int:
    """Kill this user's processes of a job, or of all jobs; return how many there were."""
    first = marked(job_id)
    left = first
    for _ in range(_TRIES):
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
        left = {pid: job for pid, job in marked(job_id).items() if not _is_zombie(pid)}
    return len(first)


def _job_of(environ: bytes) -> str:
    for variable in environ.split(b"\0"):
        if variable.startswith(_MARK):
            return variable.removeprefix(_MARK).decode(errors="replace")
    return ""


def _is_zombie(pid: int) -> bool:
    try:
        text = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return True
    return text[text.rindex(b")") + 2 :][:1] in b"ZX"
