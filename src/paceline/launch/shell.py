"""A remote shell's end of a broker's socket: stdin to the socket. Only the standard library: every process has one."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

#: Exit code of a remote shell whose engine failed; ssh has the same.
LOST = 255

READ_BYTES = 65536


def open_shell(path: str, request: bytes) -> socket.socket:
    """Send a request to a broker, then this process's stdin; return the socket with what comes back.

    Args:
        path: of the broker's socket.
        request: a line without its end.

    Raises:
        OSError: the broker is gone.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(request + b"\n")
    except OSError:
        connection.close()
        raise
    threading.Thread(target=_send_input, args=[connection], daemon=True).start()
    return connection


def write(fd: int, data: bytes) -> None:
    """Write all bytes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def run_shell(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a remote shell's main function and exit, also while its thread waits for input."""
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)


def _send_input(connection: socket.socket) -> None:
    try:
        while data := os.read(0, READ_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:  # the broker is gone; the main thread reports it
        pass
