"""The transport between processes: TCP, and unix sockets on one host, with the job's security.

A hub dials listeners, one :class:`Channel` each; a listener accepts the connections of many hubs. They promise this:

- A message arrives whole or not at all.
- Messages of one channel arrive in the order of sending, but for answers with an ``urgency``.
- An open connection loses no message. Messages on their way when it closes may be lost, and are not repeated.

:mod:`paceline.net.call` makes exactly-once requests of that.

| state of a channel | event | becomes |
|---|---|---|
| not connected | the listener answers, and the handshake is good | open |
| not connected | no process listens, or the handshake fails | not connected; tries again after 0.05 s to 1 s |
| open | it ends, or a record is damaged | not connected; tries again after 0.05 s |
| any | :meth:`Channel.stop` | closed for good, when the connection ends |

| timeout | must exceed |
|---|---|
| connecting (:data:`~paceline.net.endpoints.CONNECT_S`) | a round trip and two lost packets |
| handshake (:data:`~paceline.net.admission.HANDSHAKE_S`) | the pauses of both processes on busy machines |
| retry of a connection, 0.05 s to 1 s | – |
| a member's ``disconnect_grace_s`` | a retry, and a handshake on machines that are not busy |
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence

from paceline.net.admission import HANDSHAKE_S, Gate
from paceline.net.allocator import keep_freed_frames
from paceline.net.base import Frames
from paceline.net.claims import Allowance, Bounds, Claims, host_of
from paceline.net.connection import Connection, close_connections
from paceline.net.endpoints import HostWatch, dial, listen, tune
from paceline.net.handshake import GREETING_BYTES, Agreed, HandshakeError, Initiator, Responder, Seen, Way
from paceline.net.received import ReceivedQueue
from paceline.net.security import Security, is_of_another_user

logger = logging.getLogger(__name__)

#: Pause between two tries to connect: the first, and the longest. It doubles.
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0

#: A refusal may come from a listener that is about to end; this often means what it says.
REFUSALS = 3

_open: weakref.WeakSet[SocketHub | SocketListener] = weakref.WeakSet()


def close_all() -> None:
    """Close the hubs and listeners that are still open, before the interpreter ends.

    A thread that comes back from the cipher while the interpreter is torn down aborts the process.
    """
    for one in list(_open):
        one.close()


class Channel(Connection[int]):
    """A connection to a listener, made again whenever it is lost.

    Its arguments are those of :meth:`SocketHub.connect`, and the index by which its hub knows it.

    Attributes:
        host: watches the listener's host; None before the first connection.
        is_open: it is connected now.
        is_deserted: at the last try the kernel of the listener's host said that no process listens there.
        reopened: it was connected anew; the reader of this clears it.
        failures: refusals since the last connection.
        refusal: the last one.
    """

    def __init__(
        self,
        index: int,
        address: str,
        identity: bytes,
        listener: str,
        security: Security,
        bulk: bool,
        arrived: ReceivedQueue[int],
    ) -> None:
        super().__init__(identity.decode("ascii", "replace"), index, arrived, keeps=True)
        self._address, self._identity, self._listener = address, identity, listener
        self._security, self._bulk = security, bulk
        self._stopped = threading.Event()
        self.host: HostWatch | None = None
        self.is_open = self.reopened = self.is_deserted = False
        self.failures = 0
        self.refusal: HandshakeError | None = None
        if bulk:
            keep_freed_frames()

    def start(self) -> None:
        """Connect, on a thread."""
        self.run(self._address, self._keep_connected)

    def stop(self) -> None:
        """Connect no more."""
        self._stopped.set()

    def _keep_connected(self) -> None:
        pause_s = FIRST_RETRY_S
        while not self._stopped.is_set():
            try:
                if self._connect_once():
                    pause_s = FIRST_RETRY_S
            except OSError as error:  # no process listens there now
                self.is_deserted = isinstance(error, ConnectionRefusedError)
            except Exception:
                # Thread border: without this thread the connection would never be made again.
                logger.exception("the connection to %s failed", self._address)
            if self._stopped.wait(pause_s):
                return
            pause_s = min(LAST_RETRY_S, 2 * pause_s)

    def _connect_once(self) -> bool:
        """Use one connection until it ends; False when there was none.

        Raises:
            OSError: no process listens there, or it does not answer.
        """
        with dial(self._address) as sock:
            tune(sock, self._bulk)
            self.socket, self.is_deserted = sock, False
            if self._stopped.is_set():  # end() may have come before there was a socket
                return False
            try:
                agreed = self._greet(sock)
            except HandshakeError as error:
                self.failures, self.refusal = self.failures + 1, error
                self._arrived.wake()
                return False
            self.open(sock, agreed)
            self.reopened |= self.host is not None
            self.host, self.is_open, self.failures = HostWatch(sock), True, 0
            self._arrived.wake()
            self.read(sock, agreed, f"the listener at {self._address}")
            self.is_open = False
            self._arrived.wake()
            return True

    def _greet(self, sock: socket.socket) -> Agreed:
        if is_of_another_user(sock):
            raise HandshakeError("a process of another user listens there")
        deadline = time.monotonic() + HANDSHAKE_S
        way = Way(sock.family == socket.AF_UNIX, self._listener)
        initiator = Initiator(self._security.psk, self._identity, self._security.encrypt, way)
        sock.sendall(initiator.hello())
        welcome = b""
        while len(welcome) < GREETING_BYTES:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            got = sock.recv(GREETING_BYTES - len(welcome))
            if not got:
                raise ConnectionError("closed during the handshake")
            welcome += got
        join, agreed = initiator.take(welcome)
        sock.sendall(join)
        sock.settimeout(None)
        return agreed


class SocketHub(ReceivedQueue[int]):
    """Connections to several listeners, one per channel.

    One thread at a time sends, and one at a time receives; any thread wakes.
    """

    def __init__(self, security: Security) -> None:
        super().__init__()
        self._security = security
        self._pid = os.getpid()
        self._channels: list[Channel] = []
        self._closed = False
        self._lock = threading.Lock()
        _open.add(self)

    def connect(self, address: str, identity: bytes, listener: str, *, bulk: bool = False) -> int:
        """Open a channel; returns its index, counted from 0.

        Args:
            address: address of the listener.
            identity: the listener's name for this side.
            listener: role and rank of the listener, as in ``server 1``; the channel opens to no other.
            bulk: the channel carries tensors.
        """
        with self._lock:  # a hub that is closed meanwhile closes this channel, too
            index = len(self._channels)
            channel = Channel(index, address, identity, listener, self._security, bulk, self)
            self._channels.append(channel)
            if not self._closed:
                channel.start()
        return index

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel, or have it wait there. Large frames are not copied: the caller leaves them unchanged."""
        self._channels[channel].send(frames)

    def is_open(self, channel: int) -> bool:
        """Tell whether the channel is connected now."""
        return self._channels[channel].is_open

    def host_silent_s(self, channel: int) -> float | None:
        """Return the seconds since the kernel of the listener's host was heard; None where that is not known."""
        one = self._channels[channel]
        return one.host.silent_s() if one.is_open and one.host is not None else None

    def is_deserted(self, channel: int) -> bool:
        """Return whether the kernel of the listener's host says that no process listens there any more."""
        return self._channels[channel].is_deserted

    def reopened(self) -> list[int]:
        """Return channels that were connected anew since the last call: messages under way may be lost."""
        anew = [index for index, channel in enumerate(self._channels) if channel.reopened]
        for index in anew:
            self._channels[index].reopened = False
        return anew

    def refused(self, channel: int) -> HandshakeError | None:
        """Return why the other side refuses this process, if it does."""
        one = self._channels[channel]
        return one.refusal if one.failures >= REFUSALS else None

    def close(self, linger_s: float = 0.0) -> None:
        """Close all channels. Does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
        close_connections(self._channels, linger_s)
        self.end()


class _Peer(Connection[bytes]):
    """A holder of the key that is connected to a listener, and perhaps a member."""

    def __init__(
        self, identity: bytes, sock: socket.socket, arrived: ReceivedQueue[bytes], allowance: Allowance
    ) -> None:
        super().__init__(identity.decode("ascii", "replace"), identity, arrived, False, allowance)
        self.identity, self.host = identity, HostWatch(sock)
        self.place = "" if sock.family == socket.AF_UNIX else host_of(sock.getpeername()[0])
        """Its host; empty: this one, over a unix socket."""


class SocketListener(ReceivedQueue[bytes]):
    """Many peers' connections. Used by one thread, except :meth:`wake`.

    Args:
        addresses: addresses to listen at: ``tcp://10.0.0.1:*``, ``ipc://@name``.
        security: the job's key.
        name: role and rank of this process, as in ``server 1``. None: not known yet; a peer that connects waits until
            :meth:`serve_as` tells it.
        bulk: carries tensors.
        watch: notice closed connections (:meth:`lost`).
        bounds: little is taken from a peer before :meth:`claimed`. None: whoever holds the key is a member.

    Raises:
        OSError: an address cannot be listened at.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security,
        name: str | None,
        *,
        bulk: bool = False,
        watch: bool = False,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__()
        if bulk:
            keep_freed_frames()
        self._bounds, self._claims = bounds, Claims[_Peer](0 if bounds is None else bounds.of_a_host)
        self._security, self._watch, self._bulk = security, watch, bulk
        self._pid = os.getpid()
        self._peers: dict[bytes, _Peer] = {}
        self._lost: list[bytes] = []
        self._lock = threading.Lock()
        self._closed = False
        self._gate: Gate | None = None
        sockets: list[socket.socket] = []
        found: list[str] = []
        try:
            for address in addresses:
                sock, reached = listen(address)
                sockets.append(sock)
                found.append(reached)
        except OSError:
            for sock in sockets:
                sock.close()
            raise
        self.addresses = tuple(found)
        self._sockets = sockets
        _open.add(self)
        if name is not None:
            self.serve_as(name)

    def serve_as(self, name: str) -> None:
        """Let peers in that mean this process: its role and rank."""
        psk, encrypt, seen = self._security.psk, self._security.encrypt, Seen()
        self._gate = Gate(self._sockets, lambda is_unix: Responder(psk, encrypt, Way(is_unix, name), seen), self._admit)

    def _admit(self, sock: socket.socket, agreed: Agreed) -> None:
        tune(sock, self._bulk)
        with self._lock:
            is_low = self._bounds is not None and agreed.identity not in self._claims
            peer = _Peer(agreed.identity, sock, self, Allowance.before_a_claim() if is_low else self._of_members())
            peer.open(sock, agreed)
            before = self._peers.get(agreed.identity)
            self._peers[agreed.identity] = peer
            oldest = self._claims.add(peer, peer.place) if is_low else None
        if before is not None:
            before.end()
        if oldest is not None:
            logger.info("closed the connection with %s: too many of its host have not said who they are", oldest.name)
            oldest.end()
        logger.info("connected: %s", peer.name)
        peer.run(peer.name, self._serve, peer, sock, agreed)

    def _of_members(self) -> Allowance:
        return Allowance() if self._bounds is None else Allowance(self._bounds.largest)

    def claimed(self, identity: bytes) -> None:
        """Take from a peer what a member may send: it has said who it is. Idempotent."""
        with self._lock:
            self._claims.claim(identity)
            peer = self._peers.get(identity)
            if peer is not None:
                self._claims.remove(peer, peer.place)
        if peer is not None and self._bounds is not None:
            peer.claimed(self._bounds.largest)

    def unclaimed(self, identity: bytes) -> None:
        """End the connection of a peer that is no member's any more."""
        with self._lock:
            self._claims.forget(identity)
            peer = self._peers.get(identity)
        if peer is not None:
            peer.end()

    def _serve(self, peer: _Peer, sock: socket.socket, agreed: Agreed) -> None:
        peer.read(sock, agreed, f"peer {peer.name}")
        peer.close()
        sock.close()
        with self._lock:
            self._claims.remove(peer, peer.place)
            is_last = self._peers.get(peer.identity) is peer
            if is_last:
                del self._peers[peer.identity]
            if is_last and self._watch:
                self._lost.append(peer.identity)
        if self._watch:
            self.wake()

    def send(self, peer: bytes, frames: Frames, urgency: int | None = None) -> None:
        """Send to a peer; dropped without a word when its connection is closed.

        Args:
            peer: the receiver.
            frames: large ones are not copied, so they must stay unchanged.
            urgency: the message may overtake those to the same peer that wait with a higher number.
        """
        with self._lock:
            found = self._peers.get(peer)
        if found is not None:
            found.send(frames, urgency)

    def unsent_bytes(self, peer: bytes) -> int:
        """Return the bytes of messages to a peer that wait here."""
        with self._lock:
            found = self._peers.get(peer)
        return 0 if found is None else found.unsent_bytes()

    def is_sending(self, peer: bytes) -> bool:
        """Return whether messages to a peer are under way: they wait here, or its kernel does not have them yet."""
        with self._lock:
            found = self._peers.get(peer)
        return found is not None and found.is_sending()

    def lost(self) -> list[bytes]:
        """Return peers whose connection has closed since the last call; only with ``watch``."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def host_silent_s(self, peer: bytes) -> float | None:
        """Return the seconds since the kernel of the peer's host was heard; None where that is not known."""
        with self._lock:
            found = self._peers.get(peer)
        return None if found is None else found.host.silent_s()

    def watch_hub(self, hub: SocketHub) -> None:
        """Make ``receive`` return also when something arrives at a hub that the same thread uses."""
        hub.add_watcher(self)

    def close(self, linger_s: float = 0.0) -> None:
        """Stop listening and close all connections. Does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._gate is not None:
            self._gate.close()
        else:
            for sock in self._sockets:
                sock.close()
        with self._lock:
            peers = list(self._peers.values())
        close_connections(peers, linger_s)
        self.end()
