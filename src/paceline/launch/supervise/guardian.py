"""Processes that act after this one has ended, however it ended: ``kill -9`` gives it no chance to clean up.

Such a process is forked early and reads a pipe whose write end only this process holds, and each child until it becomes
its command. Other children, of a script that uses the launcher, close it. The end of the pipe says that it is time.

| class | acts by |
|---|---|
| :class:`Guardian` | killing the sessions that children have written into the pipe before they became commands |
| :class:`Canceller` | running a command that cancels a job of an engine, unless it was released |

So no command runs that the guardian does not know. The launcher ends every job by closing the guardian's pipe, so this
path is used all the time. The guardian checks and kills every ``_PAUSE_S``, at most ``_TRIES`` times. A process that
has made a session of its own (``setsid``) escapes it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from paceline.errors import LaunchError
from paceline.host import forks
from paceline.launch import processes
from paceline.launch.supervise.child import ENDING, PASSED_ON, why_none

_TRIES = 100
_PAUSE_S = 0.02
_RELEASED = b"."


class _Survivor:
    """A child that acts when the pipe to it has ended, on all that was written into it.

    Fork it first, while this process holds nothing that the child should not keep open.
    """

    def __init__(self, act: Callable[[bytes], None]) -> None:
        with forks.held():
            read_fd, self.fd = os.pipe()
            self._pid = fork()
            if self._pid == 0:
                _main(read_fd, self.fd, act)
            os.close(read_fd)
            forks.in_children(self, _Survivor._forget)

    def _forget(self) -> None:
        """Close the write end in a child, whose life does not count."""
        os.close(self.fd)
        self.fd = -1

    def close(self) -> None:
        """Have the child act, and wait until that is done. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            os.waitpid(self._pid, 0)


class Guardian(_Survivor):
    """Kills every session that was registered when it is closed, or when this process has ended."""

    def __init__(self) -> None:
        super().__init__(lambda text: sweep({int(line) for line in text.split()}))

    def register(self) -> None:
        """Register the calling process, which leads its session. Called between fork and exec."""
        os.write(self.fd, b"%d\n" % os.getpid())


class Canceller(_Survivor):
    """Runs a command, such as ``scancel 7``, when this process ends without :meth:`release`."""

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__(partial(_cancel, argv))

    def release(self) -> None:
        """Let the job go on, or be: it has ended, or was cancelled. Idempotent."""
        if self.fd >= 0:
            os.write(self.fd, _RELEASED)
            self.close()


def fork() -> int:
    """Fork.

    Raises:
        LaunchError: the system refuses one more process.
    """
    try:
        return os.fork()
    except OSError as error:
        raise LaunchError(f"no process can be started: {why_none(error)}") from error


def _main(read_fd: int, write_fd: int, act: Callable[[bytes], None]) -> None:
    """Run the child. Never returns, also after an error: it is a copy of the launcher."""
    try:
        os.close(write_fd)
        detach(read_fd)
        text = b""
        while chunk := os.read(read_fd, 4096):
            text += chunk
        act(text)
    finally:
        os._exit(0)


def _cancel(argv: Sequence[str], text: bytes) -> None:
    if not text:
        os.execvp(argv[0], list(argv))


def detach(read_fd: int) -> None:
    """Leave the launcher's terminal, signals and open files; a pipe of the launcher would otherwise stay open."""
    os.setsid()
    for signum in (*ENDING, *PASSED_ON, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for name in os.listdir("/dev/fd"):
        if int(name) not in (0, 1, 2, read_fd):
            with contextlib.suppress(OSError):  # the descriptor that listed them is gone already
                os.close(int(name))


def sweep(registered: Collection[int]) -> None:
    """Kill every process of the given sessions, until none is left (for at most 2 s)."""
    for _ in range(_TRIES):
        if not processes.living(registered):
            return
        processes.send(signal.SIGKILL, registered)
        time.sleep(_PAUSE_S)
