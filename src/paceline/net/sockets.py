"""The transport between processes: TCP, and unix sockets on one host, with the job's security.

Each connection has a thread that reads, and one that sends where something has to wait. The threads spend their time in
the kernel or in the cipher, without the interpreter's lock.

| timeout | must exceed |
|---|---|
| handshake (:data:`~paceline.net.admission.HANDSHAKE_S`) | a round trip and two lost packets |
| retry of a connection, 0.05 s to 1 s | – |
| a member's ``disconnect_grace_s`` | a retry and a handshake |
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from paceline.net.admission import Gate
from paceline.net.allocator import keep_freed_frames
from paceline.net.base import Frames
from paceline.net.channel import Channel
from paceline.net.connection import Connection, close_connections, read
from paceline.net.endpoints import end, listen
from paceline.net.handshake import Agreed, Responder, Seen, Way
from paceline.net.inbox import ReceivedQueue
from paceline.net.keepalive import HostWatch, tune
from paceline.net.records import RecordWriter
from paceline.net.security import Security

logger = logging.getLogger(__name__)

#: A refusal may come from a listener that is about to end; this often means what it says.
REFUSALS = 3

_open: weakref.WeakSet[SocketHub | SocketListener] = weakref.WeakSet()


def close_all() -> None:
    """Close what is still open, before the interpreter ends.

    A thread that comes back from the cipher while the interpreter is torn down aborts the process.
    """
    for one in list(_open):
        one.close()


class _Peer(Connection):
    """A member that is connected to a listener."""

    def __init__(self, identity: bytes, sock: socket.socket) -> None:
        super().__init__(identity.decode("ascii", "replace"), keeps=False)
        self.identity, self.name = identity, identity.decode("ascii", "replace")
        self.socket, self.host = sock, HostWatch(sock)


class SocketListener:
    """Many peers' connections.

    Args:
        addresses: where to listen: ``tcp://10.0.0.1:*``, ``ipc://@name``.
        security: the job's key.
        name: role and rank of this process, as in ``server 1``. None: not known yet; who connects waits until
            :meth:`serve_as` tells it.
        bulk: carries tensors.
        watch: notice closed connections (:meth:`lost`).

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
    ) -> None:
        if bulk:
            keep_freed_frames()
        self._security, self._watch, self._bulk = security, watch, bulk
        self._pid = os.getpid()
        self._inbox: ReceivedQueue[bytes] = ReceivedQueue()
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
        peer = _Peer(agreed.identity, sock)
        peer.sender.open(sock, RecordWriter(agreed.sending, agreed.encrypts))
        with self._lock:
            before = self._peers.get(agreed.identity)
            self._peers[agreed.identity] = peer
        if before is not None:
            before.end()
        logger.info("connected: %s", peer.name)
        peer.run(peer.name, self._serve, peer, sock, agreed)

    def _serve(self, peer: _Peer, sock: socket.socket, agreed: Agreed) -> None:
        def put(frames: Sequence[Any], size: int, room: threading.Semaphore) -> None:
            self._inbox.put(peer.identity, frames, size, room)

        read(sock, agreed, f"peer {peer.name}", peer.room, put)
        end(sock)
        peer.sender.shut(sock)
        peer.sender.close()
        sock.close()
        with self._lock:
            is_last = self._peers.get(peer.identity) is peer
            if is_last:
                del self._peers[peer.identity]
            if is_last and self._watch:
                self._lost.append(peer.identity)
        if self._watch:
            self._inbox.wake()

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return what has arrived as (peer, frames)."""
        return self._inbox.take(timeout_s)

    def send(self, peer: bytes, frames: Frames, urgency: int | None = None) -> None:
        """Send to a peer; dropped when it is gone."""
        with self._lock:
            found = self._peers.get(peer)
        if found is not None:
            found.sender.send(frames, urgency)

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
        hub.add_inbox(self._inbox)

    def wake(self) -> None:
        """Make ``receive`` return now."""
        self._inbox.wake()

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


class SocketHub:
    """Connections to several listeners, one per channel.

    Args:
        security: the job's key.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._pid = os.getpid()
        self._channels: list[Channel] = []
        self._inbox: ReceivedQueue[int] = ReceivedQueue()
        self._closed = False
        self._lock = threading.Lock()
        _open.add(self)

    def connect(self, address: str, identity: bytes, listener: str, *, bulk: bool = False) -> int:
        """Open a channel to a listener of this role and rank; returns its index."""
        if bulk:
            keep_freed_frames()
        with self._lock:  # a hub that is closed meanwhile closes this channel, too
            index = len(self._channels)
            channel = Channel(index, address, identity, listener, self._security, bulk, self._inbox)
            self._channels.append(channel)
            if not self._closed:
                channel.start()
        return index

    def add_inbox(self, inbox: ReceivedQueue[Any]) -> None:
        """Have another inbox of the same thread wake up for what arrives on all channels."""
        self._inbox.add_watcher(inbox)

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel; waits there until it is connected."""
        self._channels[channel].sender.send(frames)

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """Return what has arrived as (channel, frames)."""
        return self._inbox.take(timeout_s)

    def is_open(self, channel: int) -> bool:
        """Tell whether the channel is connected now."""
        return self._channels[channel].is_open

    def host_silent_s(self, channel: int) -> float | None:
        """Return the seconds since the kernel of the listener's host was heard; None where that is not known."""
        one = self._channels[channel]
        return one.host.silent_s() if one.is_open and one.host is not None else None

    def is_deserted(self, channel: int) -> bool:
        """Return whether the kernel of the listener's host says that nobody listens there any more."""
        return self._channels[channel].is_deserted

    def reopened(self) -> list[int]:
        """Return channels that were connected anew since the last call: what was under way may be lost."""
        anew = [index for index, channel in enumerate(self._channels) if channel.reopened]
        for index in anew:
            self._channels[index].reopened = False
        return anew

    def refused(self, channel: int) -> str:
        """Return why the other side refuses this process, or an empty string."""
        one = self._channels[channel]
        return one.reason if one.failures >= REFUSALS else ""

    def wake(self) -> None:
        """Make ``receive`` return now."""
        self._inbox.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close all channels. Does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
        close_connections(self._channels, linger_s)
