"""The launcher's ends of the pipes to and from the scheduler.

The scheduler binds a port that is free at that moment and says which: nobody has to guess one beforehand, so there is
no moment in which another program can take it. Later it says that all members have joined, which process failed first,
as the members saw it, which workers the others go on without, and that all workers have said goodbye. The launcher says
which processes have ended, because only their parent knows their exit codes, and how much CPU time others have used.
:mod:`paceline.scheduler.launcher` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import re

from paceline import forks
from paceline.launch.plan import ProcessName
from paceline.launch.supervise.events import Complete, Lost, Over

_ADDRESS = re.compile(r"tcp://\S+:[1-9]\d{0,4}")


class ReadyPipe:
    """The launcher's end of the pipe; the scheduler inherits :attr:`write_fd`.

    Attributes:
        has_address: the address has been read; news may follow.
        ended: the scheduler writes no more.
    """

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._text = b""
        self.has_address = self.ended = False

    def read(self) -> str | None:
        """Return the address once its line is complete, "" at the end of a pipe without one, None before.

        Raises:
            ValueError: the line is not an address.
        """
        try:
            data = os.read(self.fd, 4096)
        except BlockingIOError:
            return None
        self._text += data
        if b"\n" not in self._text:
            return None if data else ""
        first, self._text = self._text.split(b"\n", 1)
        line = first.decode(errors="replace").strip()
        if not _ADDRESS.fullmatch(line):
            raise ValueError(f"said it listens at {line!r}, which is not tcp://host:port")
        self.has_address = True
        return line

    def news(self) -> list[Complete | Lost | Over]:
        """Return what the scheduler has reported since the last call."""
        try:
            data = os.read(self.fd, 65536)
            self.ended = not data
        except BlockingIOError:
            data = b""
        *lines, self._text = (self._text + data).split(b"\n")
        return [event for event in map(_event, lines) if event is not None]

    def close(self) -> None:
        """Close the launcher's end."""
        os.close(self.fd)

    def close_write(self) -> None:
        """Close the scheduler's end in this process, after the scheduler has it."""
        os.close(self.write_fd)


def _event(line: bytes) -> Complete | Lost | Over | None:
    try:
        match json.loads(line):
            case ["lost", str() as role, int() as rank, str() as reason, bool() as goes_on]:
                return Lost(ProcessName(role, rank), reason, goes_on)
            case ["complete"]:
                return Complete()
            case ["over"]:
                return Over()
    except ValueError:
        pass
    return None


class EndedPipe:
    """The launcher's end of the pipe on which it says which processes run and which have ended."""

    def __init__(self) -> None:
        with forks.held():
            self.read_fd, self._fd = os.pipe()
            forks.in_children(self, EndedPipe._release)
        os.set_blocking(self._fd, False)

    def _release(self) -> None:
        """Close the launcher's end in a child: the scheduler notices the launcher's end by it."""
        os.close(self._fd)
        self._fd = -1

    def write(self, member: ProcessName, code: int) -> None:
        """Say how a process ended."""
        self._write(*member, code)

    def write_cpu(self, member: ProcessName, cpu_s: float) -> None:
        """Say that a process runs, and how much CPU time it has used."""
        self._write(*member, None, cpu_s)

    def _write(self, *words: str | float | None) -> None:
        """Write a line. What the scheduler cannot read any more is lost."""
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(words).encode() + b"\n")

    def close_read(self) -> None:
        """Close the scheduler's end in this process, after the scheduler has it."""
        os.close(self.read_fd)

    def close(self) -> None:
        """Close the launcher's end. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
