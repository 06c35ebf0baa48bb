"""A remote shell through a broker: ``python -m paceline.launch.remote.shell SOCKET REQUEST``.

It sends the request, a line of JSON, to the socket of a broker, then its own stdin. Frames come back: a byte that names
the kind, four bytes of length, the bytes. The shell writes output to stdout or stderr, and ends with an exit code that
it gets. If none comes, the broker is gone. The broker's side of such a connection is here as well.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

OUT, ERR, EXIT = 1, 2, 3
LARGEST = 1 << 20
#: Exit code of a remote shell whose engine failed; ssh has the same.
LOST = 255

READ_BYTES = 65536
_HEAD = struct.Struct("!BI")


def main(words: Sequence[str]) -> int:
    """Serve until the command has ended; return its exit code."""
    path, request = words
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(request.encode() + b"\n")
            threading.Thread(target=_send_input, args=[connection], daemon=True).start()
            for kind, data in unpack(connection):
                if kind == EXIT:
                    return int(data)
                _write(1 if kind == OUT else 2, data)
        print("the broker is gone", file=sys.stderr)
    except OSError as error:
        print(f"the broker is gone: {error.strerror}", file=sys.stderr)
    return LOST


def _send_input(connection: socket.socket) -> None:
    try:
        while data := os.read(0, READ_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:  # the broker is gone; the main thread reports it
        pass


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def pack(kind: int, data: bytes) -> bytes:
    """Return frames of any number of bytes."""
    parts = [data[start : start + LARGEST] for start in range(0, len(data), LARGEST)] or [b""]
    return b"".join(_HEAD.pack(kind, len(part)) + part for part in parts)


def unpack(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Give the frames of a connection until it ends; a last one that is cut off is lost.

    Raises:
        ValueError: a frame is longer than any that is sent.
    """
    with connection.makefile("rb") as stream:
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            kind, length = _HEAD.unpack(head)
            if length > LARGEST:
                raise ValueError(f"a frame of {length} bytes")
            data = stream.read(length)
            if len(data) < length:
                return
            yield kind, data


def read_request(connection: socket.socket) -> Any:
    """Return a shell's request to a broker. The rest is the input of its command.

    Raises:
        OSError: the shell has left.
    """
    text = b""
    while not text.endswith(b"\n"):
        one = connection.recv(1)
        if not one:
            raise OSError("the remote shell left")
        text += one
    return json.loads(text)


def accept_all(listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
    """Give every connection to ``take``, each in a thread; returns at once."""

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=take, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # its thread may wait for input
