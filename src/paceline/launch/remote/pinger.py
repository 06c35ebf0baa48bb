"""A process that pings the agents of a job for as long as the launcher lives, also while the launcher is paused.

The launcher does not run while it is stopped (Ctrl-Z, a debugger), nor reads while nobody reads its output. Its agents
must not take it for dead then. The pinger is in a session of its own, so signals of the terminal do not reach it. It
writes into the same pipes as the launcher: every write is one whole line of at most ``PIPE_BUF`` bytes, which the
kernel does not mix with another (:func:`~paceline.launch.remote.agent_link.pieces`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterable

from paceline.host import forks
from paceline.launch.remote.agent_link import PING_S, encode
from paceline.launch.supervise.guardian import detach, fork

#: Most pipes that arrive with one message.
_FDS = 16

_PING = encode("ping")


class Pinger:
    """Pings every pipe that it is given. It ends when it is closed, or when this process has ended."""

    def __init__(self) -> None:
        with forks.held():
            self._socket, its_end = socket.socketpair()
            self._pid = fork()
            if self._pid == 0:
                _main(its_end)
            its_end.close()
            forks.in_children(self, lambda one: one._socket.close())

    def add(self, fd: int) -> None:
        """Ping the agent at the other end of a pipe, which does not block, from now on."""
        with contextlib.suppress(OSError):  # somebody has killed the pinger
            socket.send_fds(self._socket, [b"."], [fd])

    def close(self) -> None:
        """End the process, which holds the pipes open. Idempotent."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._socket.close()
            self._pid = 0


def _main(launcher: socket.socket) -> None:
    """Run the pinger. Never returns, also after an error: it is a copy of the launcher."""
    try:
        detach(launcher.fileno())
        _ping_until_the_end(launcher)
    finally:
        os._exit(0)


def _ping_until_the_end(launcher: socket.socket) -> None:
    pipes: set[int] = set()
    due = time.monotonic()
    while True:
        if select.select([launcher], [], [], max(0.0, due - time.monotonic()))[0]:
            data, fds, _, _ = socket.recv_fds(launcher, 1, _FDS)
            if not data:
                return
            pipes.update(fds)
        if time.monotonic() >= due:
            pipes -= _broken(pipes)
            due = time.monotonic() + PING_S


def _broken(pipes: Iterable[int]) -> set[int]:
    """Ping, and return the pipes that nobody reads any more, closed."""
    broken = set()
    for fd in pipes:
        try:
            os.write(fd, _PING)
        except BlockingIOError:  # it is full, and has more to read than a ping
            pass
        except OSError:
            os.close(fd)
            broken.add(fd)
    return broken
