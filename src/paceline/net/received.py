"""Messages that have arrived over many connections, for the one thread that takes them.

A large message is read by its connection's own thread, beside all else, and waits in a queue. To wake another thread
for a small message takes longer than to read it. So a connection over which only small messages come *lends* its
reading to the thread that takes the messages (Linux only: by epoll):

| a connection is | event                                                            | becomes                |
|-----------------|------------------------------------------------------------------|------------------------|
| read by its own | :data:`LEND_AFTER` small messages in a row, as it puts the last  | offered, in the queue  |
| offered         | the offer is taken: all messages before it are taken, too        | lent                   |
| lent            | a small message is there                                         | lent                   |
| lent            | a message with a large frame begins, or an error                 | read by its own thread |
| offered, lent   | :meth:`Loan.give_back`: its end, or a send that failed           | read by its own thread |

While no thread takes messages, those of a lent connection wait in the kernel. So does its end.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.net.records import ClosedError, RecordReceiver

#: Large messages read from a peer before this process takes them: enough to keep it busy. The rest waits at the sender,
#: whose frames are views of what it holds anyway; here each would be a copy.
RECEIVE_AHEAD = 4
#: The same for messages below this size, which cost little to hold and much to wait for one by one.
RECEIVE_AHEAD_SMALL, SMALL_MESSAGE_BYTES = 256, 64 * 1024

#: How long a message waits for room. Then the connection is closed and made again: its peer, and the threads of this
#: process, can go on. It must exceed any ``timeout_s`` of a request that a user waits for.
UNREAD_S = 600.0

#: Messages and bytes (of the last message more) taken in one go: no peer can starve the rest of a loop.
BURST, BURST_BYTES = 256, 16 * 1024 * 1024

#: Messages without a large frame that come in a row before a connection is lent: more than a round has beside tensors.
LEND_AFTER = 16

Source = TypeVar("Source")

#: Permits to read one more message each. To take one and give it back is 0.6 us; with a semaphore it was 2.8 us.
Permits: TypeAlias = queue.SimpleQueue[None]


class Room:
    """Room for messages that are read and not taken yet: ``ahead`` small ones, and some large ones."""

    def __init__(self, ahead: int = RECEIVE_AHEAD_SMALL) -> None:
        self._ahead, self._small, self._large = ahead, _permits(ahead), _permits(RECEIVE_AHEAD)

    def widen(self) -> None:
        """Make as much room as there usually is."""
        for _ in range(self._ahead, RECEIVE_AHEAD_SMALL):
            self._small.put(None)
        self._ahead = RECEIVE_AHEAD_SMALL

    def wait(self, size: int) -> Permits:
        """Wait until there is room for a message; returns the queue that gets a permit when it is taken.

        Raises:
            ProtocolError: this process has taken none for :data:`UNREAD_S`.
        """
        room = self._small if size < SMALL_MESSAGE_BYTES else self._large
        try:
            room.get(timeout=UNREAD_S)
        except queue.Empty:
            raise ProtocolError(
                f"this process has taken no message for {UNREAD_S:g} s; the connection is made again"
            ) from None
        return room

    def end(self) -> None:
        """Let a thread that waits go on."""
        self._small.put(None)
        self._large.put(None)


def _permits(count: int) -> Permits:
    found: Permits = queue.SimpleQueue()
    for _ in range(count):
        found.put(None)
    return found


class SocketPoll:
    """Waits until one of several sockets can be read, or another thread rings. Of Linux alone."""

    IS_POSSIBLE = hasattr(select, "epoll") and hasattr(os, "eventfd")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        if sys.platform == "linux":
            self._poll, self._bell = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._bell, select.EPOLLIN)

    def wait(self, timeout_s: float) -> list[int]:
        """Return the descriptors of sockets that can be read or have ended; after a ring, perhaps none."""
        ready: list[int] = []
        if sys.platform == "linux":
            try:
                events = self._poll.poll(timeout_s)
            except ValueError:  # another thread has closed it
                return ready
            for fd, _ in events:
                if fd == self._bell:
                    os.eventfd_read(fd)
                else:
                    ready.append(fd)
        return ready

    def ring(self) -> None:
        """End a wait. Any thread may call it."""
        with self._lock:
            if sys.platform == "linux" and not self._is_closed:
                os.eventfd_write(self._bell, 1)

    def add(self, fd: int) -> None:
        """Wait for a socket, too."""
        with self._lock:
            if sys.platform == "linux" and not self._is_closed:
                self._poll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Wait for a socket no more; before it is closed."""
        with self._lock:
            if sys.platform == "linux" and not self._is_closed:
                self._poll.unregister(fd)

    def close(self) -> None:
        """Close the descriptors. The thread that waits has stopped."""
        with self._lock:
            if sys.platform == "linux" and not self._is_closed:
                self._is_closed = True
                self._poll.close()
                os.close(self._bell)


class Loan(Generic[Source]):
    """The reading of one connection, lent by its own thread to the thread that takes the messages.

    Attributes:
        lock: held by the thread that reads.
        returned: set once the connection's own thread reads again.
    """

    def __init__(self, source: Source, sock: socket.socket, reader: RecordReceiver) -> None:
        self.source, self.fd, self._reader = source, sock.fileno(), reader
        self.lock, self.returned = threading.Lock(), threading.Event()
        self._error: Exception | None = None

    def messages(self, most: int) -> Sequence[Frames]:
        """Return the small messages that are there. Gives the connection back when another one begins, or it ends."""
        found: list[Frames] = []
        with self.lock:
            if self.returned.is_set():
                return found
            # A record that was read in part cannot be read again: after an error, the connection's own thread ends it.
            try:
                self._reader.take_small(found, most)
            except Exception as error:  # noqa: BLE001 - thread border: check() raises it
                self._error = error
                self.returned.set()
            except BaseException:  # Ctrl-C interrupts this thread, not that one, which makes the connection again
                self._error = ClosedError()
                self.returned.set()
                raise
            if self._reader.has_begun_large:
                self.returned.set()
        return found

    def give_back(self) -> None:
        """Have the connection's own thread go on reading. Any thread may call it."""
        self.returned.set()

    def check(self) -> None:
        """Raise the error with which the other thread stopped reading, if there was one."""
        if self._error is not None:
            raise self._error


class _Arrived(NamedTuple):
    source: Any
    frames: Frames
    size: int
    room: Permits


class ReceivedQueue(Generic[Source]):
    """Messages that have arrived over many connections: one thread takes them, and any thread can wake it.

    Base of hubs and listeners, whose connections put messages into it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Arrived | Loan[Source] | None] = queue.SimpleQueue()
        self._watchers: list[ReceivedQueue[Any]] = []
        self._poll = SocketPoll() if SocketPoll.IS_POSSIBLE else None
        self._sleeps = False
        """The thread that takes messages waits for ``_poll``."""
        self._loans: dict[int, Loan[Source]] = {}
        self._unread: list[Loan[Source]] = []
        """Loans that may have more messages than were taken."""

    # ---- threads of connections, and others ------------------------------------------------------------------------

    def put(self, source: Source, frames: Frames, size: int, room: Permits) -> None:
        """Add a message; ``room`` gets a permit when it is taken."""
        self._put(_Arrived(source, frames, size, room))
        for watcher in self._watchers:
            watcher.wake()

    def lend(self, loan: Loan[Source]) -> None:
        """Lend a connection, after the messages that were put, until it is given back.

        Raises:
            Exception: the error with which the other thread stopped reading.
        """
        poll = self._poll
        if poll is None or self._watchers:  # whoever takes the messages waits somewhere else
            return
        self._put(loan)
        loan.returned.wait()  # nobody has to speak, so there is no deadline, as for any reader
        with loan.lock:
            if self._loans.get(loan.fd) is loan:
                poll.remove(loan.fd)
                del self._loans[loan.fd]
        loan.check()

    def _put(self, one: _Arrived | Loan[Source] | None) -> None:
        self._queue.put(one)
        if self._sleeps and self._poll is not None:
            self._poll.ring()

    def add_watcher(self, other: ReceivedQueue[Any]) -> None:
        """Wake another queue for everything that arrives here; before the first connection."""
        self._watchers.append(other)

    def wake(self) -> None:
        """Make :meth:`receive` return now. Any thread may call it."""
        self._put(None)

    def end(self) -> None:
        """Close the descriptors. Messages can be put and taken as before."""
        poll, self._poll = self._poll, None
        if poll is not None:
            poll.close()

    # ---- the thread that takes messages ----------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> list[tuple[Source, Frames]]:
        """Return the messages that have arrived, after waiting at most ``timeout_s`` for the first."""
        poll = self._poll
        if poll is None or self._watchers:
            return self._taken(timeout_s)
        self._sleeps = True
        try:
            is_idle = self._queue.empty() and not self._unread
            ready = poll.wait(timeout_s if is_idle else 0.0)
        finally:
            self._sleeps = False
        taken = [] if self._queue.empty() else self._taken(0.0, poll)
        loans, self._unread = self._unread, []
        for fd in ready:
            loan = self._loans.get(fd)
            if loan is not None:
                loans.append(loan)
        for loan in loans:
            found = loan.messages(BURST)
            for frames in found:
                taken.append((loan.source, frames))
            if len(found) == BURST:
                self._unread.append(loan)
        return taken

    def _taken(self, timeout_s: float, poll: SocketPoll | None = None) -> list[tuple[Source, Frames]]:
        """Return messages of the queue, and take the connections that are lent there."""
        taken: list[tuple[Source, Frames]] = []
        size = 0
        try:
            one = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            while True:
                if isinstance(one, Loan):
                    self._take(one, poll)
                elif one is not None:
                    one.room.put(None)
                    taken.append((one.source, one.frames))
                    size += one.size
                if len(taken) >= BURST or size >= BURST_BYTES:
                    break
                one = self._queue.get_nowait()
        except queue.Empty:
            return taken
        if not self._queue.empty():
            # What stays here has woken the watchers already, and they may sleep again.
            for watcher in self._watchers:
                watcher.wake()
        return taken

    def _take(self, loan: Loan[Source], poll: SocketPoll | None) -> None:
        """Watch a connection that is lent. Messages of it may have been read already, with the last one before."""
        if poll is None:
            loan.give_back()
            return
        with loan.lock:
            if not loan.returned.is_set():
                poll.add(loan.fd)
                self._loans[loan.fd] = loan
                self._unread.append(loan)
