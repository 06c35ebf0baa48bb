"""Kills what the launcher started when the launcher itself is killed.

``kill -9`` gives the launcher no chance to clean up, so a second process does it.

| event | the guardian |
|---|---|
| a child writes its session's id to the pipe, before it becomes its command | remembers the session |
| the write end of the pipe is closed | kills all those sessions, and exits |

Only the launcher holds the write end, and each child until it becomes its command. So no command runs that the guardian
does not know. Other children, of a script that uses the launcher, close it. The launcher ends every job in the same
way, by closing the pipe, so this path is used all the time.

It checks and kills every ``_PAUSE_S``, at most ``_TRIES`` times. A process that has made a session of its own
(``setsid``) escapes it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from paceline import forks
from paceline.launch import processes

_TRIES = 100
_PAUSE_S = 0.02


class Guardian:
    """The launcher's end: fork the guardian, register sessions with it, release it.

    Fork it first, while the process holds nothing that the guardian should not keep open.
    """

    def __init__(self) -> None:
        with forks.held():
            read_fd, self.fd = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                _main(read_fd, self.fd)
            os.close(read_fd)
            forks.in_children(self, Guardian._release)

    def _release(self) -> None:
        """Close the write end in a child, which then has no guardian."""
        os.close(self.fd)
        self.fd = -1

    def register(self) -> None:
        """Register the calling process, which leads its session. Called between fork and exec."""
        os.write(self.fd, b"%d\n" % os.getpid())

    def close(self) -> None:
        """Have everything that is registered killed, and wait until that is done. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            os.waitpid(self._pid, 0)


def _main(read_fd: int, write_fd: int) -> None:
    """Run the guardian. Never returns, also after an error: this process is a copy of the launcher."""
    try:
        os.close(write_fd)
        detach(read_fd)
        sweep(_read_sessions(read_fd))
    finally:
        os._exit(0)


def detach(read_fd: int) -> None:
    """Leave the launcher's terminal, signals and open files; a pipe of the launcher would otherwise stay open."""
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, read_fd):
            with contextlib.suppress(OSError):  # the descriptor that listed them is gone already
                os.close(int(name))


def _read_sessions(read_fd: int) -> set[int]:
    text = b""
    while chunk := os.read(read_fd, 4096):
        text += chunk
    return {int(line) for line in text.split()}


def sweep(registered: set[int]) -> None:
    """Kill every process of the given sessions, until none is left (for at most 2 s)."""
    for _ in range(_TRIES):
        if not processes.living(registered):
            return
        processes.send(signal.SIGKILL, registered)
        time.sleep(_PAUSE_S)
