"""The sending half of a way to a peer, which may be connected several times in a row.

| state | a message that comes |
|---|---|
| connected, nothing under way, all frames small | is sent by the thread that brings it, as far as the kernel takes it |
| connected, else | waits for the thread that sends, by its urgency |
| not connected | waits (hub) or is dropped (listener) |

Records are numbered when they are made, so only one thread at a time makes them: the one that has set ``_busy``. What
was under way when a connection closed is lost; who asked asks after it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

from paceline.net import traffic
from paceline.net.base import Frames
from paceline.net.endpoints import end
from paceline.net.outgoing import Outgoing
from paceline.net.records import SMALL_BYTES, RecordWriter, in_head, size_of

logger = logging.getLogger(__name__)

#: How long :meth:`Sender.shut` waits for what is being sent. The connection is shut down by then, so it fails at once.
_LAST_SEND_S = 1.0


class Sender:
    """Sends messages to one peer.

    Args:
        name: of its thread.
        keeps: messages wait for a connection; else they are dropped without one.
    """

    def __init__(self, name: str, keeps: bool) -> None:
        self._name, self._keeps = name, keeps
        self._changed = threading.Condition(threading.Lock())
        self._waiting: Outgoing[Frames] = Outgoing()
        self._socket: socket.socket | None = None
        self._writer: RecordWriter | None = None
        self._rest: Any = b""
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    # ---- connections -----------------------------------------------------------------------------------------------

    def open(self, sock: socket.socket, writer: RecordWriter) -> None:
        """Send over a connection from now on."""
        with self._changed:
            while self._busy:
                self._changed.wait()
            self._socket, self._writer = sock, writer
            self._go_on()

    def shut(self, sock: socket.socket) -> None:
        """Use a connection no more, after it was shut down; then it may be closed."""
        with self._changed:
            if self._socket is not sock:
                return
            self._socket = self._writer = None
            if len(self._rest):
                self._rest, self._busy = b"", False
            if not self._keeps:
                self._waiting = Outgoing()
            self._changed.notify_all()
            # A descriptor that is closed while a thread sends may be another connection's by then.
            self._changed.wait_for(lambda: not self._busy, _LAST_SEND_S)

    def close(self, linger_s: float = 0.0) -> None:
        """End, after waiting at most ``linger_s`` for what is still to be sent over an open connection."""
        deadline = time.monotonic() + linger_s
        with self._changed:
            while self._socket is not None and (self._busy or self._waiting):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._closed = True
            self._changed.notify_all()

    def join(self, until: float) -> None:
        """Wait until a time for the thread that sends, after :meth:`close`, when the socket has been shut down."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    # ---- messages --------------------------------------------------------------------------------------------------

    def send(self, frames: Frames, urgency: int | None = None) -> None:
        """Send a message, or have it wait; large frames are not copied."""
        # What is small is copied: the caller may change it as soon as this returns.
        frames = [frame if size_of(frame) >= SMALL_BYTES else bytes(frame) for frame in frames]
        sizes = [size_of(frame) for frame in frames]
        with self._changed:
            if self._closed or (self._socket is None and not self._keeps):
                return
            sock, writer = self._socket, self._writer
            if sock is None or sock.family != socket.AF_UNIX:
                traffic.note_sent(sum(sizes))
            if sock is None or writer is None or self._busy or self._waiting or not all(in_head(sizes)):
                self._waiting.add(frames, urgency)
                self._go_on()
                return
            self._busy = True
        try:
            self._send_now(sock, next(writer.pieces(frames)))
        except BaseException:
            # Process border: a signal handler may raise in here (Ctrl-C). A record that was sent in part, or was only
            # numbered, cannot be followed by another one.
            end(sock)
            with self._changed:
                self._rest, self._busy = b"", False
                self._changed.notify_all()
            raise

    def _send_now(self, sock: socket.socket, piece: bytes) -> None:
        """Send as much of a message in one piece as the kernel takes at once."""
        try:
            sent = sock.send(piece, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:  # the connection is closed, which its reader notices
            sent = len(piece)
        with self._changed:
            if sent < len(piece) and self._socket is sock:
                self._rest = memoryview(piece)[sent:]
            else:
                self._busy = False
            self._go_on()

    def _go_on(self) -> None:
        """Have the thread look at what there is to do. The lock is held."""
        if self._thread is None and self._has_work():
            self._thread = threading.Thread(target=self._run, name=f"paceline-send {self._name}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._socket is not None and (len(self._rest) > 0 or (bool(self._waiting) and not self._busy))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._has_work():
                    self._changed.wait()
                if self._closed:
                    return
                sock, writer, rest = self._socket, self._writer, self._rest
                assert sock is not None
                assert writer is not None
                self._rest, self._busy = b"", True
                taken = None if len(rest) else self._waiting.take()
            self._send(sock, writer, rest, taken)
            del sock, writer, rest, taken  # the next message may take long to come
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _send(self, sock: socket.socket, writer: RecordWriter, rest: Any, taken: Frames | None) -> None:
        """Send the rest of a message, or a whole one."""
        try:
            if taken is None:
                sock.sendall(rest)
            else:
                for piece in writer.pieces(taken):
                    sock.sendall(piece)
        except OSError:
            end(sock)  # the reader of this connection sees it end and calls shut()
        except Exception:
            # Thread border: without a thread nothing would be sent to this peer any more.
            logger.exception("closed the connection with %s", self._name)
            end(sock)
