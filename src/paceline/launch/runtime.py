"""The jobs of this user that run now: a file per job, of mode 0600, in the user's runtime folder.

A file has the job's key, so nobody else may read it. The launcher removes it at the end; the next launcher that looks
removes that of a killed one.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

from paceline.errors import LaunchError
from paceline.host.text_files import write_text
from paceline.host.user_folder import folder
from paceline.launch.processes import birth
from paceline.naming import meant


@dataclass(frozen=True)
class JobRecord:
    """A job's data for ``paceline jobs``, ``status`` and ``kill``."""

    id: str
    pid: int
    """The launcher's pid."""
    born: str
    """When the launcher's process began: see :func:`~paceline.launch.processes.birth`."""
    started: float
    """Seconds since 1970."""
    command: str
    hosts: tuple[str, ...]
    workers: int
    servers: int
    scheduler: str = ""
    """Address; empty until the scheduler listens."""
    key: str = ""
    choice: str = ""
    """The choice of ``dist_auto`` and its reason, for a job whose workers were measured first."""

    @property
    def is_known_alive(self) -> bool:
        """Whether the launcher runs, as far as is known: that of another machine is not seen."""
        return not self.pid or self.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether the launcher runs."""
        return birth(self.pid) == self.born


def write(record: JobRecord) -> None:
    """Write a job's file, or replace it."""
    write_text(folder() / f"{record.id}.json", json.dumps(asdict(record)), 0o600)


def remove(job_id: str) -> None:
    """Remove a job's file. Idempotent."""
    (folder() / f"{job_id}.json").unlink(missing_ok=True)


def jobs() -> list[JobRecord]:
    """Return the jobs whose launcher runs on this machine, the oldest first; forget the others."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            values = json.loads(path.read_text())
            record = JobRecord(**(values | {"hosts": tuple(values["hosts"])}))
            if record.is_alive:
                found.append(record)
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda record: record.started)


def find(job_id: str) -> JobRecord:
    """Return a job by its id or the beginning of it; of an empty one, the only job that runs.

    Raises:
        LaunchError: there is none, or more than one.
    """
    running = {record.id: record for record in jobs()}
    found = meant(job_id, running)
    if len(found) == 1:
        return running[found[0]]
    known = ", ".join(running)
    if not running:
        raise LaunchError("no job of yours runs on this machine; a job is known where its launcher runs")
    if not found:
        raise LaunchError(f"no job {job_id!r} runs on this machine; there are {known}")
    raise LaunchError(f"several jobs run on this machine: {known}; name one")
