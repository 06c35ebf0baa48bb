"""Cancel a job of an engine if the launcher is killed before it could."""

from __future__ import annotations

import os
from collections.abc import Sequence

from paceline import forks
from paceline.launch.supervise.guardian import detach

_RELEASED = b"."


class Canceller:
    """Runs a command when this process ends without :meth:`release`.

    Args:
        argv: the command, such as ``scancel 7``.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        with forks.held():
            read_fd, self._fd = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                _main(read_fd, self._fd, argv)
            os.close(read_fd)
            forks.in_children(self, Canceller._forget)

    def _forget(self) -> None:
        """Close the write end in a child, whose life does not count."""
        os.close(self._fd)
        self._fd = -1

    def release(self) -> None:
        """Let the job go on, or be: it has ended, or was cancelled. Idempotent."""
        if self._fd >= 0:
            os.write(self._fd, _RELEASED)
            os.close(self._fd)
            self._fd = -1
            os.waitpid(self._pid, 0)


def _main(read_fd: int, write_fd: int, argv: Sequence[str]) -> None:
    """Wait for the launcher's end. Never returns: this process is a copy of it."""
    try:
        os.close(write_fd)
        detach(read_fd)
        if not os.read(read_fd, 1):
            os.execvp(argv[0], list(argv))
    finally:
        os._exit(0)
