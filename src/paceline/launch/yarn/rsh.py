"""A remote shell to a container: ``python -m paceline.launch.yarn.rsh SOCKET CONTAINER``.

It asks the hub for a container; then its stdin and stdout are those of the agent there. Only the standard library: one
runs for every process of a job.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence

LOST = 255

_READ_BYTES = 65536


def main(words: Sequence[str]) -> int:
    """Serve until the container is gone; return the exit code."""
    path, name = words
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError as error:
            print(f"the hub is gone: {error.strerror}", file=sys.stderr)
            return LOST
        connection.sendall(name.encode() + b"\n")
        threading.Thread(target=_send_input, args=[connection], daemon=True).start()
        try:
            while data := connection.recv(_READ_BYTES):
                _write(data)
        except OSError as error:
            print(f"the hub is gone: {error.strerror}", file=sys.stderr)
            return LOST
    return 0


def _send_input(connection: socket.socket) -> None:
    try:
        while data := os.read(0, _READ_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:  # the hub is gone; the main thread says so
        pass


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest) :]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # the thread may wait for input for ever
