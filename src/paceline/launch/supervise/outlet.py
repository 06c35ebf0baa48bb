"""Write to a terminal, pipe or file that others use as well, without ever waiting for its reader."""

from __future__ import annotations

import contextlib
import os
import select
import stat


class Outlet:
    """The target of a descriptor.

    A descriptor that is made non-blocking is so for all processes that share it: the user's shell, ``tee``. So a pipe
    or terminal is opened once more where the system can (``/proc/self/fd``). Where it cannot, as with a socket, a write
    is as long as the kernel promises that it does not wait.

    Attributes:
        fd: the descriptor to wait for.
    """

    def __init__(self, fd: int) -> None:
        self._given, kind = fd, os.fstat(fd).st_mode
        self._may_wait = stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISSOCK(kind)
        own = None
        if self._may_wait:
            with contextlib.suppress(OSError):
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        self.fd = fd if own is None else own

    def write(self, data: memoryview) -> memoryview:
        """Write what can be written now; return the rest.

        Raises:
            OSError: it cannot be written, and never will.
        """
        with contextlib.suppress(BlockingIOError):  # also of a descriptor that another process made non-blocking
            while data and (self.fd != self._given or not self._may_wait or self._is_ready()):
                most = select.PIPE_BUF if self.fd == self._given and self._may_wait else len(data)
                data = data[os.write(self.fd, data[:most]) :]
        return data

    def _is_ready(self) -> bool:
        one = select.poll()
        one.register(self.fd, select.POLLOUT)
        return bool(one.poll(0))

    def release(self) -> None:
        """Close what was opened. Idempotent."""
        if self.fd != self._given:
            os.close(self.fd)
            self.fd = self._given
