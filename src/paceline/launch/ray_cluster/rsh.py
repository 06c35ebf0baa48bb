"""A remote shell over Ray: ``python -m paceline.launch.ray_cluster.rsh SOCKET BUNDLE ARGV...``.

It runs a command in an actor of a bundle, as ``ssh HOST`` does on a host: its stdin, stdout and stderr are the
command's, and so is its exit code (255 if Ray failed; what Ray says is then on stderr). Only the standard library: one
runs for every process of a job.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence

from paceline.launch.ray_cluster.frames import EXIT, OUT, unpack

LOST = 255


def main(words: Sequence[str]) -> int:
    """Run a command in an actor and return its exit code."""
    path, bundle, *argv = words
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError as error:
            print(f"the Ray driver is gone: {error.strerror}", file=sys.stderr)
            return LOST
        connection.sendall(json.dumps([int(bundle), argv]).encode() + b"\n")
        threading.Thread(target=_send_input, args=[connection], daemon=True).start()
        for kind, data in unpack(connection):
            if kind == EXIT:
                return int(data)
            _write(1 if kind == OUT else 2, data)
    print("the Ray driver is gone", file=sys.stderr)
    return LOST


def _send_input(connection: socket.socket) -> None:
    try:
        while data := os.read(0, 65536):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:  # the driver is gone; the main thread says so
        pass


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # the thread may wait for input for ever
