"""The launcher's ends of the pipes to and from the scheduler.

The scheduler binds a port that is free at that moment and says which. It is not guessed beforehand, so there is
no moment in which another program can take it. Later it says that all members have joined, which process failed first,
as the members saw it, which workers the others go on without, and that all workers have said goodbye. The launcher says
which processes have ended, because only their parent knows their exit codes, and how much CPU time others have used.
It also asks for the status of the job, and says when it ends the job by SIGTERM, which is no notice to the workers.
:mod:`paceline.scheduler.launcher` is the other side.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from paceline.host import forks
from paceline.launch.supervise.events import Event, Ready, event_of

#: The pipe takes the status of a job of thousands, whether or not it is read.
_PIPE_BYTES = 1 << 20

_ADDRESS = re.compile(r"tcp://\S+:[1-9]\d{0,4}")


class ReadyPipe:
    """The launcher's end of the pipe; the scheduler inherits :attr:`write_fd`.

    Attributes:
        ended: the scheduler writes no more.
    """

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # of Linux
            with contextlib.suppress(OSError):  # a smaller pipe takes the status of fewer members
                fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._text = b""
        self._has_address = self.ended = False

    def news(self) -> list[Event]:
        """Return the scheduler's news since the last call: its address first, then how the job goes.

        Raises:
            ValueError: the first line is not an address.
        """
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        self.ended = not data
        *lines, self._text = (self._text + data).split(b"\n")
        return [event for event in map(self._event, lines) if event is not None]

    def _event(self, line: bytes) -> Event | None:
        if self._has_address:
            with contextlib.suppress(ValueError, TypeError):
                return event_of(json.loads(line))
            return None
        address = line.decode(errors="replace").strip()
        if not _ADDRESS.fullmatch(address):
            raise ValueError(f"said it listens at {address!r}, which is not tcp://host:port")
        self._has_address = True
        return Ready(address)

    def close(self) -> None:
        """Close the launcher's end."""
        os.close(self.fd)

    def close_write(self) -> None:
        """Close the scheduler's end in this process, after the scheduler has it."""
        os.close(self.write_fd)


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

    def tell(self, words: Sequence[Any]) -> None:
        """Write a line. Lines that the scheduler cannot read any more are lost."""
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
