"""One end of a connection: reads messages as far as there is room for them, and sends those that wait, in order.

A connection has a thread that reads, where :mod:`paceline.net.received` does not do that, and one that sends the bytes
that the kernel does not take at once:

| state | a message that comes |
|---|---|
| connected, nothing under way, :data:`AT_ONCE_BYTES` or less | its own thread sends it, as far as the kernel takes it |
| connected, else | waits for the thread that sends, by its urgency |
| not connected | waits (hub) or is dropped (listener) |

Records are numbered when they are made, so only one thread at a time makes them: the one that has set ``_busy``.
Messages that were under way or waited when a connection closed are lost; their sender asks after them. One that waits
for the next connection must not overtake them.

The thread that reads also closes the socket: a descriptor that is closed under it may be another connection's by then.
"""

from __future__ import annotations

import heapq
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.net.claims import UNCLAIMED_AHEAD, UNCLAIMED_UNSENT_BYTES, Allowance
from paceline.net.endpoints import end, unsent_bytes
from paceline.net.handshake import Agreed
from paceline.net.received import LEND_AFTER, Loan, ReceivedQueue, Room
from paceline.net.records import (
    SMALL_BYTES,
    ClosedError,
    Intake,
    RecordReceiver,
    RecordSender,
    copy_of,
    size_of,
    traffic,
)

logger = logging.getLogger(__name__)

#: Largest message that is sent without another thread: encrypting it takes about as long as waking one.
AT_ONCE_BYTES = 512 * 1024

#: How long the last message over a connection may take that is shut down: it fails at once.
LAST_SEND_S = 1.0

#: How long closing waits for all threads together. Each of them has little to do by then, but on a busy machine they
#: wait for a processor. Those that are only about to connect are waited for as long as ``_DIALS_S``.
_JOIN_S, _DIALS_S = 30.0, 1.0

Item = TypeVar("Item")
Source = TypeVar("Source")


class Outgoing(list[tuple[int, int, int, int, Item]]):
    """A priority queue: the lowest number is sent first, after Jayarajan et al. 2019 (P3) and Peng et al. 2019.

    Items without a number keep their place: they overtake no item, and no item overtakes them.

    Attributes:
        size: bytes of all items.
    """

    def __init__(self) -> None:
        super().__init__()
        self._section = self._count = self.size = 0

    def add(self, item: Item, number: int | None = None, size: int = 0) -> None:
        """Add an item of so many bytes; of those with a number the lowest is sent first."""
        if number is None:
            self._section += 1
        self._count += 1
        heapq.heappush(self, (self._section, number or 0, self._count, size, item))
        self.size += size
        if number is None:
            self._section += 1

    def take(self) -> Item:
        """Remove and return the next item.

        Raises:
            IndexError: there is none.
        """
        *_, size, item = heapq.heappop(self)
        self.size -= size
        return item


class Connection(Generic[Source]):
    """One end of a way to a peer, which may be connected several times in a row.

    Attributes:
        socket: the present one; it may be in its handshake, or closed.
        allowance: what the peer may send.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        arrived: ReceivedQueue[Source],
        keeps: bool,
        allowance: Allowance | None = None,
    ) -> None:
        self.name, self.allowance = name, allowance or Allowance()
        self.socket: socket.socket | None = None
        self._source, self._arrived, self._keeps = source, arrived, keeps
        self._lock = threading.Lock()
        self._work, self._idle = threading.Condition(self._lock), threading.Condition(self._lock)
        """Notified when the thread that sends has something to do, and when nothing is being sent."""
        self._waiting: Outgoing[tuple[Frames, list[int]]] = Outgoing()
        """Messages, each with the sizes of its frames."""
        self._writer: RecordSender | None = None
        """None: not connected."""
        self._is_network = True
        """Whether the present socket, or the next one, leads to other hosts."""
        self._rest: Iterator[Any] | None = None
        """The part of a message under way that the kernel did not take."""
        self._busy = self._closed = self._is_ended = False
        self._room = self._new_room()
        self._loan: Loan[Source] | None = None
        self._reading: threading.Thread | None = None
        self._sending: threading.Thread | None = None

    def _new_room(self) -> Room:
        return Room(UNCLAIMED_AHEAD) if self.allowance.is_low else Room()

    # ---- the thread that reads -------------------------------------------------------------------------------------

    def run(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start the thread that reads."""
        thread = threading.Thread(target=target, args=args, name=f"paceline-read {name}", daemon=True)
        thread.start()
        self._reading = thread

    def open(self, sock: socket.socket, agreed: Agreed) -> None:
        """Send over a socket from now on.

        Raises:
            ConnectionError: the last message over the socket before is still being sent.
        """
        with self._lock:
            if not self._idle.wait_for(lambda: not self._busy, LAST_SEND_S):
                raise ConnectionError(f"a message to {self.name} is still being sent over an earlier connection")
            self.socket, self._writer = sock, RecordSender(agreed.sending, agreed.encrypts)
            self._room = self._new_room()
            self._is_network = sock.family != socket.AF_UNIX
            self._go_on()

    def claimed(self, largest: int) -> None:
        """Allow the peer, which has said who it is, messages of so many bytes, and to be silent. Idempotent."""
        with self._lock:
            if self.allowance.is_low:
                self.allowance.raise_to(largest)
                self._room.widen()

    def read(self, sock: socket.socket, agreed: Agreed, whom: str) -> None:
        """Read messages until the connection ends; then it sends no more, and may be closed."""
        reader = RecordReceiver(agreed.receiving, agreed.encrypts, Intake(sock, self.allowance))
        room, small_ones = self._room, 0
        try:
            while True:
                frames = reader.message()
                self._arrived.put(self._source, frames, reader.size, room.wait(reader.size))
                del frames  # the next message may take long, and this one's memory is not needed here
                small_ones = 0 if reader.is_large else small_ones + 1
                if small_ones >= LEND_AFTER and not self.allowance.is_low:
                    self._lend(Loan(self._source, sock, reader))
                    small_ones = 0
        except ProtocolError as error:
            logger.warning("closed the connection with %s: %s", whom, error)
        except (OSError, ClosedError):
            pass
        except Exception:
            # Thread border: a connection that is not read any more must end, or its peer waits for ever.
            logger.exception("closed the connection with %s", whom)
        end(sock)
        self._shut()

    def _lend(self, loan: Loan[Source]) -> None:
        """Leave the reading to the thread that takes the messages, until it or the connection's end gives it back."""
        self._loan = loan
        if self._is_ended:  # nobody may take messages any more
            return
        self._arrived.lend(loan)

    def _shut(self) -> None:
        """Send nothing more over the socket, which was shut down."""
        with self._lock:
            self._writer = None
            if self._rest is not None:
                self._rest, self._busy = None, False
            self._waiting = Outgoing()
            self._idle.notify_all()
            # A descriptor that is closed while a thread sends may be another connection's by then.
            self._idle.wait_for(lambda: not self._busy, LAST_SEND_S)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def send(self, frames: Frames, urgency: int | None = None) -> None:
        """Send a message, or have it wait; large frames are not copied."""
        sizes = list(map(size_of, frames))
        size = sum(sizes)
        with self._lock:
            sock, writer = self.socket, self._writer
            if self._closed or (writer is None and not self._keeps):
                return
            if self._is_network:
                traffic.note(sent=size)
            if sock is None or writer is None or self._busy or self._waiting or size > AT_ONCE_BYTES:
                # Small frames are copied: the caller may change them as soon as this returns.
                if sock is not None and self.allowance.is_low and self._takes_nothing(size):
                    end(sock)  # the reader of this connection sees it end and calls _shut()
                    return
                both = zip(frames, sizes, strict=True)
                kept = [frame if its >= SMALL_BYTES else copy_of(frame) for frame, its in both]
                self._waiting.add((kept, sizes), urgency, size)
                self._go_on()
                return
            self._busy = True
        try:
            self._send_now(sock, writer.pieces(frames, sizes))
        except BaseException:
            # Process border: a signal handler may raise in here (Ctrl-C). A record that was sent in part, or was only
            # numbered, cannot be followed by another one.
            end(sock)
            with self._lock:
                self._rest, self._busy = None, False
                self._idle.notify_all()
            raise

    def _takes_nothing(self, size: int) -> bool:
        """Return whether too much waits for a peer that has claimed nothing, to add so many bytes."""
        return bool(self._waiting) and self._waiting.size + size > UNCLAIMED_UNSENT_BYTES

    def unsent_bytes(self) -> int:
        """Return the bytes of messages that wait here, without the one that is being sent."""
        return self._waiting.size

    def is_sending(self) -> bool:
        """Return whether messages are under way: they wait here, or the kernel of the other end does not have them."""
        with self._lock:
            if self._writer is None or self.socket is None:
                return False
            return self._busy or bool(self._waiting) or unsent_bytes(self.socket) > 0

    def _send_now(self, sock: socket.socket, pieces: Iterator[Any]) -> None:
        """Send as much of a message as the kernel takes at once; the thread that sends has the rest."""
        rest: Iterator[Any] | None = None
        for piece in pieces:
            try:
                sent = sock.send(piece, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:  # the reader of this connection sees it end and calls _shut()
                end(sock)
                self._read_again()
                break
            if sent < len(piece):
                rest = chain([memoryview(piece)[sent:]], pieces)
                break
        with self._lock:
            if rest is not None and self._writer is not None:
                self._rest = rest
            else:
                self._busy = False
                self._idle.notify_all()
            if self._rest is not None or self._waiting:
                self._go_on()

    def _go_on(self) -> None:
        """Have the thread that sends look for work. The lock is held."""
        if self._sending is None and self._has_work():
            thread = threading.Thread(target=self._run_sending, name=f"paceline-send {self.name}", daemon=True)
            thread.start()
            self._sending = thread
        self._work.notify()

    def _has_work(self) -> bool:
        return self._writer is not None and (self._rest is not None or (bool(self._waiting) and not self._busy))

    def _run_sending(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not self._has_work():
                    self._work.wait()
                if self._closed:
                    return
                sock, writer, pieces = self.socket, self._writer, self._rest
                assert sock is not None
                assert writer is not None
                self._rest, self._busy = None, True
                if pieces is None:
                    pieces = writer.pieces(*self._waiting.take())
            try:
                for piece in pieces:
                    sock.sendall(piece)
                    del piece
            except OSError:
                end(sock)  # the reader of this connection sees it end and calls _shut()
            except Exception:
                # Thread border: without a thread nothing would be sent to this peer any more.
                logger.exception("closed the connection with %s", self.name)
                end(sock)
            del sock, writer, pieces  # the next message may take long to come
            with self._lock:
                self._busy = False
                self._idle.notify_all()

    # ---- closing ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Connect no more, where this end does."""

    def close(self, linger_s: float = 0.0) -> None:
        """Send nothing more, after waiting at most ``linger_s`` for messages to be sent over an open connection."""
        with self._lock:
            self._idle.wait_for(lambda: self._writer is None or not (self._busy or self._waiting), linger_s)
            self._closed = True
            self._work.notify()

    def end(self) -> None:
        """Have the thread that reads end."""
        self._is_ended = True
        if self.socket is not None:
            end(self.socket)
        self._room.end()
        self._read_again()

    def _read_again(self) -> None:
        """Have the connection's own thread read, if it has lent that."""
        loan = self._loan
        if loan is not None:
            loan.give_back()

    def join(self, began: float) -> None:
        """Wait for the threads, for a time that began at ``began``."""
        is_connected = self.socket is not None and self.socket.fileno() >= 0
        until = began + (_JOIN_S if is_connected else _DIALS_S)
        for thread in (self._reading, self._sending):
            if thread is not None:
                thread.join(max(0.0, until - time.monotonic()))


def close_connections(connections: Sequence[Connection[Any]], linger_s: float) -> None:
    """Close connections; all of them together have ``linger_s`` for their last messages."""
    for one in connections:
        one.stop()
    deadline = time.monotonic() + linger_s
    for one in connections:
        one.close(max(0.0, deadline - time.monotonic()))
    for one in connections:
        one.end()
    # A thread that is in the cipher while the interpreter ends would abort the process.
    began = time.monotonic()
    for one in connections:
        one.join(began)
