"""Calls that Windows does not have, and the way that is taken there. Workers alone run there, over TCP.

| call | on Windows |
|---|---|
| unix sockets | no socket has the family :data:`UNIX` |
| the user's number | 0: Windows gives each user a folder for temporary files |
| ``flock`` | no lock is taken: a file that a process has open cannot be removed there |
| ``MSG_DONTWAIT`` | no byte leaves at once; the thread that sends has all |
| ``pread`` | a position and a read, under a lock |
| shared memory | none, as where ``memfd_create`` is missing: all bytes go through sockets |
| all others | :class:`UnsupportedSystemError`, at the first use |

Modules that cannot work there take modules of the standard library from here:
``from paceline.host.systems import os``.
mypy checks all others with ``--platform win32``.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap as _mmap
import os as _os
import socket as _socket
import sys
import threading
from typing import Any, BinaryIO

from paceline.errors import PacelineError


class UnsupportedSystemError(PacelineError, AttributeError):
    """This operating system cannot run a part of paceline. The text names the call that is missing, and the way out."""


class PosixOnly:
    """A module of the standard library. A name that it does not have is an error that says the way out."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._module: object = importlib.import_module(name)
        except ImportError:
            self._module = None

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise UnsupportedSystemError(
                f"Windows has no {self._name}.{name}, which this part of paceline needs. Only workers run on Windows "
                "itself: scripts that call paceline.kvstore.create, in a job whose other processes run on Linux. Run "
                "everything else in WSL 2: https://learn.microsoft.com/windows/wsl"
            ) from None


if sys.platform == "win32":
    fcntl: Any = PosixOnly("fcntl")
    mmap: Any = PosixOnly("mmap")
    os: Any = PosixOnly("os")
    pwd: Any = PosixOnly("pwd")
    resource: Any = PosixOnly("resource")
    select: Any = PosixOnly("select")
    signal: Any = PosixOnly("signal")
    socket: Any = PosixOnly("socket")
    termios: Any = PosixOnly("termios")
    tty: Any = PosixOnly("tty")
    UNIX, NO_FOLLOW = -1, 0
else:
    import fcntl
    import mmap
    import os
    import pwd
    import resource
    import select
    import signal
    import socket
    import termios
    import tty

    #: Family of unix sockets.
    UNIX = socket.AF_UNIX

    #: Flags of ``os.open`` for a file: links are refused, and a pipe in its place is not waited for.
    NO_FOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK

_reading = threading.Lock()


def user_id() -> int:
    """Return the number of the user of this process."""
    return 0 if sys.platform == "win32" else int(os.geteuid())


def lock_file(file: int | BinaryIO, *, shared: bool = False, wait: bool = True) -> None:
    """Lock a file until this process closes it.

    Args:
        file: the file, or its descriptor.
        shared: other processes may have shared locks of it.
        wait: wait for processes that have locked it.

    Raises:
        BlockingIOError: a process has locked it, and ``wait`` is false.
        OSError: the file system has no locks.
    """
    if sys.platform != "win32":
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def send_at_once(sock: _socket.socket, data: Any) -> int:
    """Send the bytes that the kernel takes without a wait; returns their number.

    Raises:
        BlockingIOError: it takes none now.
        OSError: the connection is closed.
    """
    return 0 if sys.platform == "win32" else sock.send(data, socket.MSG_DONTWAIT)


def receive_at_once(sock: _socket.socket, into: memoryview) -> int:
    """Read the bytes that the kernel has; returns their number, 0 at the end.

    Raises:
        BlockingIOError: it has none now.
        OSError: the connection is broken.
    """
    return sock.recv_into(into, 0, socket.MSG_DONTWAIT)


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Read from a place of a file. Several threads may do so."""
    if sys.platform == "win32":
        with _reading:
            _os.lseek(fd, offset, _os.SEEK_SET)
            return _os.read(fd, size)
    else:
        return os.pread(fd, size, offset)


def private_memory(size: int) -> _mmap.mmap:
    """Return memory of this process alone, whose pages can be replaced."""
    if sys.platform == "win32":
        return _mmap.mmap(-1, size)
    else:  # noqa: RET505 (mypy takes what follows a return for unreachable)
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def c_library() -> ctypes.CDLL:
    """Return the C library of this process."""
    return ctypes.CDLL("msvcrt" if sys.platform == "win32" else None, use_errno=True)


__all__ = ["fcntl", "mmap", "os", "pwd", "resource", "select", "signal", "socket", "termios", "tty"]
