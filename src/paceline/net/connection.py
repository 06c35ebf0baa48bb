"""What both ends of a connection do: read messages as far as there is room for them, and close.

A connection has a thread that reads, and one that sends where something has to wait (:mod:`paceline.net.sender`).
The thread that reads also closes the socket: a descriptor that is closed under it may be another connection's by then.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from paceline.errors import ProtocolError
from paceline.net import traffic
from paceline.net.endpoints import end
from paceline.net.handshake import Agreed
from paceline.net.records import ClosedError, Intake, RecordReader, size_of
from paceline.net.sender import Sender

logger = logging.getLogger(__name__)

#: Large messages read from a peer before this process takes them: enough to keep it busy. The rest waits at the sender,
#: whose frames are views of what it holds anyway; here each would be a copy.
RECEIVE_AHEAD = 4
#: The same for messages below this size, which cost little to hold and much to wait for one by one.
RECEIVE_AHEAD_SMALL, SMALL_MESSAGE_BYTES = 256, 64 * 1024

#: How long closing waits for all threads together; each of them has little to do by then.
_JOIN_S = 1.0

#: Takes a message: frames, bytes, and what to release when it is used.
Put: TypeAlias = Callable[[Sequence[Any], int, threading.Semaphore], None]


class Room:
    """Room for messages that are read and not taken yet."""

    def __init__(self) -> None:
        self._small, self._large = threading.Semaphore(RECEIVE_AHEAD_SMALL), threading.Semaphore(RECEIVE_AHEAD)

    def wait(self, size: int) -> threading.Semaphore:
        """Wait until there is room for a message; returns what to release when it is taken."""
        room = self._small if size < SMALL_MESSAGE_BYTES else self._large
        room.acquire()
        return room

    def end(self) -> None:
        """Let a thread that waits go on."""
        self._small.release()
        self._large.release()


class Connection:
    """One end of a connection.

    Args:
        name: of the thread that sends.
        keeps: messages wait for a connection; else they are dropped without one.
    """

    def __init__(self, name: str, keeps: bool) -> None:
        self.sender = Sender(name, keeps)
        self.socket: socket.socket | None = None
        self.room = Room()
        self._thread: threading.Thread | None = None

    def run(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start the thread that reads."""
        self._thread = threading.Thread(target=target, args=args, name=f"paceline-read {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Connect no more, where this end does."""

    def end(self) -> None:
        """Have the thread that reads end."""
        if self.socket is not None:
            end(self.socket)
        self.room.end()

    def join(self, until: float) -> None:
        """Wait for the threads, until a time."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        self.sender.join(until)


def close_connections(connections: Sequence[Connection], linger_s: float) -> None:
    """Close connections; all of them together have ``linger_s`` for what they still send."""
    for one in connections:
        one.stop()
    deadline = time.monotonic() + linger_s
    for one in connections:
        one.sender.close(max(0.0, deadline - time.monotonic()))
    for one in connections:
        one.end()
    # A thread that is in the cipher while the interpreter ends would abort the process.
    until = time.monotonic() + _JOIN_S
    for one in connections:
        one.join(until)


def read(sock: socket.socket, agreed: Agreed, name: str, room: Room, put: Put) -> None:
    """Read messages until the connection ends."""
    is_network = sock.family != socket.AF_UNIX
    reader = RecordReader(agreed.receiving, agreed.encrypts, Intake(sock))
    try:
        while True:
            frames = reader.message()
            size = sum(map(size_of, frames))
            if is_network:
                traffic.note_received(size)
            put(frames, size, room.wait(size))
            del frames  # the next message may take long, and this one's memory is not needed here
    except ProtocolError as error:
        logger.warning("closed the connection with %s: %s", name, error)
    except (OSError, ClosedError):
        pass
    except Exception:
        # Thread border: a connection that is not read any more must end, or its peer waits for ever.
        logger.exception("closed the connection with %s", name)
