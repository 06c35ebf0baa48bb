"""The scheduler's two pipes to the launcher.

| pipe | variable | lines |
|---|---|---|
| to the launcher | ``PACELINE_READY_FD`` | the address; JSON ``["complete"]`` when all members have joined; |
| | | ``["lost", [role, rank], reason, goes on]``: failures; ``["over"]`` when all workers have said goodbye; |
| | | ``["taken_over", [role, rank]]``: a process counts that has taken over from a worker that has died; |
| | | ``["left", [role, rank]]``: a worker under notice has left, and its exit code does not matter; |
| | | ``["alone", text]``: workers train and exchange nothing; |
| | | ``["status", text]``: the status, as JSON in a text; an empty one if it is too long for the pipe |
| from the launcher | ``PACELINE_ENDED_FD`` | JSON ``["exited", [role, rank], exit code, ...]``: a process has ended; |
| | | ``["runs", [role, rank], CPU seconds, is ready]``, again and again until all members have joined; |
| | | ``["status"]`` asks for the status; the next one is asked for after the answer; |
| | | ``["ends"]``: SIGTERM to the workers, which follows, ends the job, and is no notice |

These failures are the first one, and the deaths of workers without which the others go on.

A scheduler without a launcher has neither. A scheduler whose launcher closes its ends goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from typing import NamedTuple, TypeAlias

READY_VARIABLE, ENDED_VARIABLE = "PACELINE_READY_FD", "PACELINE_ENDED_FD"

#: Bytes of the pipe to the launcher that stay free for other lines than the status.
_SPARE_BYTES = 16 * 1024


class Ended(NamedTuple):
    """A process of the job that has ended; ``code`` is its exit code, 128 + n after signal n."""

    role: str
    rank: int
    code: int


class StartProgress(NamedTuple):
    """A process of the job that runs, the CPU time that it has used, and whether it runs or waits for a processor."""

    role: str
    rank: int
    cpu_s: float
    is_ready: bool


class StatusWanted(NamedTuple):
    """The launcher asks for the status."""


class JobEnds(NamedTuple):
    """The launcher ends the job by SIGTERM."""


News: TypeAlias = Ended | StartProgress | StatusWanted | JobEnds


class Launcher:
    """The news that the scheduler and the launcher tell each other. The scheduler says each thing once.

    Attributes:
        reports_ends: whether the launcher says which processes have ended.
    """

    def __init__(self, ready_fd: int | None, ended_fd: int | None) -> None:
        self._ready_fd, self._ended_fd = ready_fd, ended_fd
        self._text = b""
        self._said: set[tuple[object, ...]] = set()
        self.reports_ends = ended_fd is not None
        if ended_fd is not None:
            os.set_blocking(ended_fd, False)

    @classmethod
    def from_environment(cls) -> Launcher:
        """Take the pipes that the launcher has named."""
        fds = [os.environ.pop(name, "") for name in (READY_VARIABLE, ENDED_VARIABLE)]
        return cls(*[int(fd) if fd else None for fd in fds])

    def announce(self, address: str) -> None:
        """Say where the scheduler listens."""
        self._write(address)

    def report_failure(self, role: str, rank: int, reason: str) -> None:
        """Say which process failed first."""
        self._write_once("lost", (role, rank), reason, False)

    def report_loss(self, role: str, rank: int, reason: str) -> None:
        """Say that a worker has died and the others go on; each time, as another process may take its rank."""
        self._write(json.dumps(["lost", (role, rank), reason, True]))

    def report_joined(self, role: str, rank: int) -> None:
        """Say that a process counts which has taken over from one that has died."""
        self._write(json.dumps(["taken_over", (role, rank)]))

    def report_left(self, role: str, rank: int) -> None:
        """Say that a worker under notice has left."""
        self._write_once("left", (role, rank))

    def report_complete(self) -> None:
        """Say that all members have joined."""
        self._write_once("complete")

    def report_alone(self, text: str) -> None:
        """Say which workers train and exchange nothing, and which line of the script is missing."""
        self._write_once("alone", text)

    def report_over(self) -> None:
        """Say that all workers have said goodbye."""
        self._write_once("over")

    def report_status(self, status: str) -> None:
        """Say how all members do. No write waits for a launcher that does not read: the answer fits the pipe."""
        if self._ready_fd is None:
            return
        line = json.dumps(["status", status])
        with contextlib.suppress(OSError):
            fits = len(line) + _SPARE_BYTES <= _size_of(self._ready_fd)
            os.write(self._ready_fd, (line if fits else json.dumps(["status", ""])).encode() + b"\n")

    def _write_once(self, *news: object) -> None:
        if news not in self._said:
            self._said.add(news)
            self._write(json.dumps(news))

    def _write(self, line: str) -> None:
        if self._ready_fd is not None:
            with contextlib.suppress(OSError):  # the launcher does not read any more
                os.write(self._ready_fd, line.encode() + b"\n")

    def news(self) -> list[News]:
        """Return the launcher's news since the last call, without waiting."""
        if self._ended_fd is None:
            return []
        try:
            data = os.read(self._ended_fd, 65536)
        except BlockingIOError:
            return []
        if not data:
            os.close(self._ended_fd)
            self._ended_fd, self.reports_ends = None, False
        *lines, self._text = (self._text + data).split(b"\n")
        return list(map(_parsed, lines))


def _size_of(pipe: int) -> int:
    """Return the bytes that fit into a pipe; 0: the system does not tell."""
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else 0


def _parsed(line: bytes) -> News:
    match json.loads(line):
        case ["exited", [role, rank], code, *_]:
            return Ended(role, rank, code)
        case ["runs", [role, rank], cpu_s, is_ready]:
            return StartProgress(role, rank, cpu_s, is_ready)
        case ["ends"]:
            return JobEnds()
    return StatusWanted()
