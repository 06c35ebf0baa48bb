"""What goes from the driver to a remote shell: a byte that says what it is, four bytes of length, the bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

OUT, ERR, EXIT = 1, 2, 3

_HEAD = struct.Struct("!BI")
LARGEST = 1 << 20


def pack(kind: int, data: bytes) -> bytes:
    """Return a frame."""
    return _HEAD.pack(kind, len(data)) + data


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
