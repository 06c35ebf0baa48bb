"""A connection to a listener, made again whenever it is lost.

| state | event | becomes |
|---|---|---|
| not connected | the listener answers, and the handshake is good | open |
| not connected | nobody listens, or the handshake fails | not connected; tries again after a pause of 0.05 s to 1 s |
| open | it ends, or what comes is damaged | not connected; tries again after 0.05 s |
| any | :meth:`Channel.stop` | closed for good, when the connection ends |
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any

from paceline.net.admission import HANDSHAKE_S
from paceline.net.connection import Connection, Room, read
from paceline.net.endpoints import dial, end
from paceline.net.handshake import GREETING_BYTES, Agreed, HandshakeError, Initiator, Way
from paceline.net.inbox import ReceivedQueue
from paceline.net.keepalive import HostWatch, tune
from paceline.net.records import RecordWriter
from paceline.net.security import Security, is_of_another_user

logger = logging.getLogger(__name__)

#: Pause between two tries to connect: the first, and the longest. It doubles.
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0


class Channel(Connection):
    """A connection to a listener, made again whenever it is lost.

    Args:
        index: of this channel, for the inbox.
        address: of the listener.
        identity: what the listener calls this side.
        listener: its role and rank: nobody else is talked to.
        security: the job's key.
        bulk: carries tensors.
        inbox: takes what arrives.

    Attributes:
        host: watches the listener's host; None before the first connection.
        is_open: it is connected now.
        was_open: it was connected at least once.
        is_deserted: at the last try the kernel of the listener's host said that nobody listens there.
        reopened: it was connected anew; the reader of this clears it.
        failures: refusals since the last connection.
        reason: of the last refusal.
    """

    def __init__(
        self,
        index: int,
        address: str,
        identity: bytes,
        listener: str,
        security: Security,
        bulk: bool,
        inbox: ReceivedQueue[int],
    ) -> None:
        super().__init__(identity.decode("ascii", "replace"), keeps=True)
        self._index, self._address, self._identity, self._listener = index, address, identity, listener
        self._security, self._bulk = security, bulk
        self._inbox = inbox
        self._closed = threading.Event()
        self.host: HostWatch | None = None
        self.is_open = self.was_open = self.reopened = self.is_deserted = False
        self.failures = 0
        self.reason = ""

    def start(self) -> None:
        """Connect, on a thread."""
        self.run(self._address, self._run)

    def _run(self) -> None:
        pause_s = FIRST_RETRY_S
        while not self._closed.is_set():
            try:
                if self._connect_once():
                    pause_s = FIRST_RETRY_S
            except OSError as error:  # nobody listens there now
                self.is_deserted = isinstance(error, ConnectionRefusedError)
            except Exception:
                # Thread border: without this thread the connection would never be made again.
                logger.exception("the connection to %s failed", self._address)
            if self._closed.wait(pause_s):
                return
            pause_s = min(LAST_RETRY_S, 2 * pause_s)

    def _connect_once(self) -> bool:
        """Use one connection until it ends; False when there was none.

        Raises:
            OSError: nobody listens there, or he does not answer.
        """
        with dial(self._address) as sock:
            tune(sock, self._bulk)
            self.socket, self.is_deserted = sock, False
            if self._closed.is_set():  # end() may have come before there was a socket
                return False
            try:
                agreed = self._greet(sock)
            except HandshakeError as error:
                self.failures, self.reason = self.failures + 1, error.reason
                self._inbox.wake()
                return False
            self.host = HostWatch(sock)
            self.sender.open(sock, RecordWriter(agreed.sending, agreed.encrypts))
            self.reopened |= self.was_open
            self.is_open, self.was_open, self.failures = True, True, 0
            self._inbox.wake()
            self.room = room = Room()

            read(sock, agreed, f"the listener at {self._address}", room, self._put)
            self.is_open = False
            end(sock)
            self.sender.shut(sock)
            self._inbox.wake()
            return True

    def _greet(self, sock: socket.socket) -> Agreed:
        if is_of_another_user(sock):
            raise HandshakeError("a process of another user listens there")
        way = Way(sock.family == socket.AF_UNIX, self._listener)
        initiator = Initiator(self._security.psk, self._identity, self._security.encrypt, way)
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(initiator.hello())
        welcome = b""
        while len(welcome) < GREETING_BYTES:
            got = sock.recv(GREETING_BYTES - len(welcome))
            if not got:
                raise ConnectionError("closed during the handshake")
            welcome += got
        join, agreed = initiator.take(welcome)
        sock.sendall(join)
        sock.settimeout(None)
        return agreed

    def _put(self, frames: Sequence[Any], size: int, room: threading.Semaphore) -> None:
        self._inbox.put(self._index, frames, size, room)

    def stop(self) -> None:
        """Connect no more."""
        self._closed.set()
