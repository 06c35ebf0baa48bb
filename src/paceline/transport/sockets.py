"""The transport between processes: TCP, and unix sockets on one host, with the job's security.

Each connection has a thread that reads, and one that sends where something has to wait. The threads spend their time in
the kernel or in the cipher, without the interpreter's lock.

| timeout | must exceed |
|---|---|
| handshake (:data:`~paceline.transport.admission.HANDSHAKE_S`) | a round trip and two lost packets |
| retry of a connection, 0.05 s to 1 s | – |
| a member's ``disconnect_grace_s`` | a retry and a handshake |
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from paceline.errors import ProtocolError
from paceline.transport import traffic
from paceline.transport.admission import HANDSHAKE_S, Gate
from paceline.transport.allocator import keep_freed_frames
from paceline.transport.base import Frames
from paceline.transport.endpoints import dial, end, listen
from paceline.transport.handshake import GREETING_BYTES, Agreed, HandshakeError, Initiator, Responder
from paceline.transport.inbox import Inbox
from paceline.transport.keepalive import HostWatch, tune
from paceline.transport.records import ClosedError, Intake, RecordReader, RecordWriter, size_of
from paceline.transport.security import Security
from paceline.transport.sender import Sender

logger = logging.getLogger(__name__)

#: Large messages read from a peer before this process takes them: enough to keep it busy. The rest waits at the sender,
#: whose frames are views of what it holds anyway; here each would be a copy.
RECEIVE_AHEAD = 4
#: The same for messages below this size, which cost little to hold and much to wait for one by one.
RECEIVE_AHEAD_SMALL, SMALL_MESSAGE_BYTES = 256, 64 * 1024

#: A refusal may come from a listener that is about to end; this often means what it says.
REFUSALS = 3

#: Takes a message: frames, bytes, and what to release when it is used.
_Put: TypeAlias = Callable[[Sequence[Any], int, threading.Semaphore], None]

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0

#: How long ``close`` waits for all threads together; each of them has little to do by then.
_JOIN_S = 1.0


_open: weakref.WeakSet[SocketHub | SocketListener] = weakref.WeakSet()


def close_all() -> None:
    """Close what is still open, before the interpreter ends.

    A thread that comes back from the cipher while the interpreter is torn down aborts the process.
    """
    for one in list(_open):
        one.close()


class _Room:
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


def _read(sock: socket.socket, agreed: Agreed, name: str, room: _Room, put: _Put) -> None:
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


class _Peer:
    """A member that is connected to a listener."""

    def __init__(self, identity: bytes, sock: socket.socket) -> None:
        self.identity, self.socket, self.host = identity, sock, HostWatch(sock)
        self.room = _Room()
        self.thread: threading.Thread | None = None
        self.sender = Sender(identity.decode("ascii", "replace"), keeps=False)

    def end(self) -> None:
        """Have the thread that reads end."""
        end(self.socket)
        self.room.end()

    def join(self, until: float) -> None:
        """Wait for the threads, until a time."""
        if self.thread is not None:
            self.thread.join(max(0.0, until - time.monotonic()))
        self.sender.join(until)


class SocketListener:
    """Many peers' connections.

    Args:
        addresses: where to listen: ``tcp://10.0.0.1:*``, ``ipc://@name``.
        security: the job's key.
        bulk: carries tensors.
        watch: notice closed connections (:meth:`lost`).

    Raises:
        OSError: an address cannot be listened at.
    """

    def __init__(
        self, addresses: Sequence[str], security: Security, *, bulk: bool = False, watch: bool = False
    ) -> None:
        if bulk:
            keep_freed_frames()
        self._watch, self._bulk = watch, bulk
        self._pid = os.getpid()
        self._inbox: Inbox[bytes] = Inbox()
        self._peers: dict[bytes, _Peer] = {}
        self._lost: list[bytes] = []
        self._lock = threading.Lock()
        self._closed = False
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
        _open.add(self)
        psk = security.psk
        self._gate = Gate(sockets, lambda local: Responder(psk, security.encrypt, local), self._admit)

    def _admit(self, sock: socket.socket, agreed: Agreed) -> None:
        tune(sock, self._bulk)
        peer = _Peer(agreed.identity, sock)
        peer.sender.open(sock, RecordWriter(agreed.sending, agreed.encrypts))
        with self._lock:
            before = self._peers.get(agreed.identity)
            self._peers[agreed.identity] = peer
        if before is not None:
            before.end()
        logger.info("connected: %s", agreed.identity.decode("ascii", "replace"))
        name = f"paceline-read {agreed.identity.decode('ascii', 'replace')}"
        peer.thread = threading.Thread(target=self._serve, args=(peer, agreed), name=name, daemon=True)
        peer.thread.start()

    def _serve(self, peer: _Peer, agreed: Agreed) -> None:
        def put(frames: Sequence[Any], size: int, room: threading.Semaphore) -> None:
            self._inbox.put(peer.identity, frames, size, room)

        _read(peer.socket, agreed, f"peer {peer.identity.decode('ascii', 'replace')}", peer.room, put)
        end(peer.socket)
        peer.sender.shut(peer.socket)
        peer.sender.close()
        peer.socket.close()
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
        self._gate.close()
        with self._lock:
            peers = list(self._peers.values())
        _close_all([peer.sender for peer in peers], linger_s)
        for peer in peers:
            peer.end()
        # A thread that is in the cipher while the interpreter ends would abort the process.
        until = time.monotonic() + _JOIN_S
        for peer in peers:
            peer.join(until)


def _close_all(senders: Sequence[Sender], linger_s: float) -> None:
    """Close what sends; all of them together have ``linger_s``."""
    deadline = time.monotonic() + linger_s
    for sender in senders:
        sender.close(max(0.0, deadline - time.monotonic()))


class _Channel:
    """A connection to a listener, made again whenever it is lost."""

    def __init__(self, index: int, address: str, identity: bytes, security: Security, bulk: bool, inbox: Inbox[int]):
        self._index, self._address, self._identity, self._security = index, address, identity, security
        self._bulk = bulk
        self._room = _Room()
        self._inbox = inbox
        self._closed = threading.Event()
        self.sender = Sender(identity.decode("ascii", "replace"), keeps=True)
        self.socket: socket.socket | None = None
        self.host: HostWatch | None = None
        self.is_open = self.was_open = self.reopened = False
        self.failures = 0
        self.reason = ""
        self._thread = threading.Thread(target=self._run, name=f"paceline-read {address}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause_s = FIRST_RETRY_S
        while not self._closed.is_set():
            try:
                if self._connect_once():
                    pause_s = FIRST_RETRY_S
            except OSError:  # nobody listens there now
                pass
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
            self.socket = sock
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
            self._room = room = _Room()

            _read(sock, agreed, f"the listener at {self._address}", room, self._put)
            self.is_open = False
            end(sock)
            self.sender.shut(sock)
            self._inbox.wake()
            return True

    def _greet(self, sock: socket.socket) -> Agreed:
        initiator = Initiator(self._security.psk, self._identity, self._security.encrypt)
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

    def join(self, until: float) -> None:
        """Wait for the threads, until a time."""
        self._thread.join(max(0.0, until - time.monotonic()))
        self.sender.join(until)

    def end(self) -> None:
        """Have the thread that reads end."""
        if self.socket is not None:
            end(self.socket)
        self._room.end()


class SocketHub:
    """Connections to several listeners, one per channel.

    Args:
        security: the job's key.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._pid = os.getpid()
        self._channels: list[_Channel] = []
        self._inbox: Inbox[int] = Inbox()
        self._closed = False
        _open.add(self)

    def connect(self, address: str, identity: bytes, *, bulk: bool = False) -> int:
        """Open a channel; returns its index."""
        if bulk:
            keep_freed_frames()
        index = len(self._channels)
        self._channels.append(_Channel(index, address, identity, self._security, bulk, self._inbox))
        return index

    def add_inbox(self, inbox: Inbox[Any]) -> None:
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
        self._closed = True
        for channel in self._channels:
            channel.stop()
        _close_all([channel.sender for channel in self._channels], linger_s)
        for channel in self._channels:
            channel.end()
        # A thread that is in the cipher while the interpreter ends would abort the process.
        until = time.monotonic() + _JOIN_S
        for channel in self._channels:
            channel.join(until)
