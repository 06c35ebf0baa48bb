"""Admission of connections: a thread accepts them; a peer holds little before it has proved to be a member.

| state | holds | leaves it when |
|---|---|---|
| stranger | a socket and < 64 bytes | its HELLO is good, time is up, or too many newer strangers have come |
| proved | a socket and < 128 bytes | its JOIN opens, time is up, or too many newer ones have come |
| member | its messages | it leaves |

A member's first bytes come right behind its connection, so it is a stranger for microseconds. However many strangers
connect, they replace each other and not members. A repeated HELLO of a member is refused; if it is so old that it is
forgotten, its sender can be *proved*, but never a member.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.host import forks
from paceline.host.descriptors import limit
from paceline.net.base import Damaged
from paceline.net.handshake import Agreed, HandshakeError, Responder
from paceline.net.security import is_of_another_user

logger = logging.getLogger(__name__)

#: Connections that are strangers, and those that are proved, at the same time.
MAX_HALF_OPEN = 256

#: How long a handshake may take: two processes must run in turn, on busy machines too. The number of connections
#: limits strangers.
HANDSHAKE_S = 30.0

#: Pause where a connection cannot be accepted and no half-open one can be dropped for it. The listening socket stays
#: readable meanwhile, so without a pause this thread would use a whole core.
_NO_DESCRIPTOR_PAUSE_S = 0.05

#: How long closing waits for the thread, which never waits for a connection; for a processor it may.
_CLOSE_S = 30.0

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: Connections accepted before those that are open already are looked at again.
_ACCEPTED_AT_ONCE = 64


def _most_half_open() -> int:
    """Return how many connections of each kind there may be: most descriptors are for what else a process opens."""
    return min(MAX_HALF_OPEN, max(1, limit() // 4))


class _HalfOpen:
    """A connection that has not proved to be a member's."""

    def __init__(self, sock: socket.socket, name: str, responder: Responder) -> None:
        self.socket, self.name, self.responder = sock, name, responder
        self.since = time.monotonic()
        self.held = b""

    def receive(self) -> bool:
        """Take the bytes that are there, at most those that the handshake wants; False when there are none now.

        Raises:
            HandshakeError: it is no member.
            OSError: the connection is closed.
        """
        try:
            got = self.socket.recv(self.responder.wanted - len(self.held))
        except BlockingIOError:
            return False
        if not got:
            raise ConnectionError("closed")
        self.held += got
        if len(self.held) == self.responder.wanted:
            message, self.held = self.held, b""
            reply = self.responder.take(message)
            if reply and self.socket.send(reply) != len(reply):
                raise ConnectionError("it takes nothing")
        return True


class Gate:
    """Accepts connections on listening sockets.

    Args:
        sockets: listening sockets; closed by :meth:`close`.
        respond: function that makes a responder; told whether the connection is a unix socket.
        admit: called on the gate's thread with each member's connection, in blocking mode, and the agreement.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        respond: Callable[[bool], Responder],
        admit: Callable[[socket.socket, Agreed], None],
    ) -> None:
        self._sockets, self._respond, self._admit = sockets, respond, admit
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, "wake")
        for sock in sockets:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, sock)
        # In the order in which they came.
        self._strangers: dict[_HalfOpen, None] = {}
        self._proved: dict[_HalfOpen, None] = {}
        self._refused = Damaged("connection from")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no connection any more."""
        self._closed = True
        self._wake.send(b".")
        self._thread.join(_CLOSE_S)
        self._wake.close()
        if not self._thread.is_alive():
            self._woken.close()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._until_next_deadline()):
                try:
                    self._attend(key.data)
                except Exception:
                    # Thread border: whatever a connection brings about, others can still join.
                    logger.exception("a connection was dropped")
            self._drop_late()
        for half in [*self._strangers, *self._proved]:
            self._drop(half)
        self._selector.close()
        for sock in self._sockets:
            sock.close()

    def _attend(self, what: Any) -> None:
        if isinstance(what, socket.socket):
            self._accept(what)
        elif isinstance(what, _HalfOpen) and (what in self._strangers or what in self._proved):
            self._advance(what)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                with forks.held():
                    sock, address = listening.accept()
                    forks.in_children(sock, socket.socket.close)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._without_descriptors(error)
                return  # else that connection has failed, and the next one may not
            sock.setblocking(False)
            is_unix = sock.family == socket.AF_UNIX
            name = "this host" if is_unix else f"{address[0]}:{address[1]}"
            if is_of_another_user(sock):
                self._refused.note(name, "it is another user's process")
                sock.close()
                continue
            half = _HalfOpen(sock, name, self._respond(is_unix))
            self._selector.register(sock, selectors.EVENT_READ, half)
            self._strangers[half] = None
            self._advance(half)
            self._limit(self._strangers)

    def _without_descriptors(self, error: OSError) -> None:
        """Make room where the process has no file descriptor left for a connection."""
        oldest = next(iter(self._strangers), None) or next(iter(self._proved), None)
        if oldest is not None:
            self._drop(oldest)
        else:
            self._refused.note("a process", f"{error}; raise the limit of {limit()} (ulimit -n)")
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)

    def _advance(self, half: _HalfOpen) -> None:
        try:
            while half.responder.agreed is None and half.receive():
                if half.responder.proved and half in self._strangers:
                    del self._strangers[half]
                    self._proved[half] = None
                    self._limit(self._proved)
        except HandshakeError as error:
            with contextlib.suppress(OSError):
                half.socket.send(error.reply)
            self._refused.note(half.name, error.reason)
            self._drop(half)
        except OSError:
            self._drop(half)
        else:
            if half.responder.agreed is not None:
                self._forget(half)
                half.socket.setblocking(True)
                try:
                    self._admit(half.socket, half.responder.agreed)
                except Exception:
                    half.socket.close()
                    raise

    def _limit(self, those: dict[_HalfOpen, None]) -> None:
        while len(those) > _most_half_open():
            self._drop(next(iter(those)))

    def _until_next_deadline(self) -> float | None:
        oldest = [next(iter(those)).since for those in (self._strangers, self._proved) if those]
        return max(0.0, min(oldest) + HANDSHAKE_S - time.monotonic()) if oldest else None

    def _drop_late(self) -> None:
        now = time.monotonic()
        for those in (self._strangers, self._proved):
            while those and next(iter(those)).since + HANDSHAKE_S <= now:
                half = next(iter(those))
                self._refused.note(half.name, f"it did not prove to be a member within {HANDSHAKE_S:g} s")
                self._drop(half)

    def _forget(self, half: _HalfOpen) -> None:
        self._selector.unregister(half.socket)
        self._strangers.pop(half, None)
        self._proved.pop(half, None)

    def _drop(self, half: _HalfOpen) -> None:
        self._forget(half)
        half.socket.close()
