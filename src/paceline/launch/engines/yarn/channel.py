"""A connection between a container and the launcher's hub: frames of bytes, sealed with keys of this connection."""

from __future__ import annotations

import contextlib
import socket
import struct

from paceline.errors import ProtocolError
from paceline.net.aead import Cipher
from paceline.net.handshake import GREETING_BYTES, HandshakeError, Initiator, Responder, Way
from paceline.net.security import Security

_LENGTH = struct.Struct("!I")
_LARGEST = 1 << 20
_WAY = Way(is_unix=False, listener="hub")
_HANDSHAKE_S = 10.0
#: An idle connection to a machine that is gone ends after 10 + 4 * 5 s.
_KEEPALIVE = ((getattr(socket, "TCP_KEEPIDLE", 0x10), 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class AgentChannel:
    """One connection after its handshake. One thread may send while another receives.

    Args:
        sock: connected, in blocking mode.
        name: name of the container.
        sending: seals messages of this side.
        receiving: opens messages of the other side.
    """

    def __init__(self, sock: socket.socket, name: str, sending: Cipher, receiving: Cipher) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.name = name
        self._sock, self._sending, self._receiving = sock, sending, receiving

    def send(self, data: bytes) -> None:
        """Send a frame; an empty one says that there is no more input.

        Raises:
            OSError: the connection has ended.
        """
        for start in range(0, len(data), _LARGEST) or (0,):
            part = data[start : start + _LARGEST]
            length = _LENGTH.pack(len(part))
            self._sock.sendall(length + self._sending.seal(part, length))

    def receive(self) -> bytes | None:
        """Return the next frame, None at the end of the connection.

        Raises:
            OSError: the connection broke.
            ProtocolError: a frame was changed on the way, or is too long.
        """
        length = _exactly(self._sock, _LENGTH.size)
        if length is None:
            return None
        [size] = _LENGTH.unpack(length)
        if size > _LARGEST:
            raise ProtocolError(f"a frame of {size} bytes")
        record = _exactly(self._sock, size + self._receiving.overhead)
        return None if record is None else self._receiving.open(record, length)

    def close(self) -> None:
        """End the connection, also for a thread that waits for it. Idempotent."""
        with contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def connect(host: str, port: int, key: str, name: str) -> AgentChannel:
    """Connect a container to the hub.

    Raises:
        OSError: the address has no listener.
        HandshakeError: the listener does not hold the key.
    """
    sock = socket.create_connection((host, port), _HANDSHAKE_S)
    try:
        initiator = Initiator(Security(key).psk, name.encode(), True, _WAY)
        sock.sendall(initiator.hello())
        join, agreed = initiator.take(_greeting(sock, GREETING_BYTES))
        sock.sendall(join)
        return AgentChannel(sock, name, agreed.sending, agreed.receiving)
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, key: str) -> AgentChannel:
    """Return the channel of a connection that the hub has accepted. The caller closes the socket after an error.

    Raises:
        OSError: it ended.
        HandshakeError: it is no container of this job.
    """
    sock.settimeout(_HANDSHAKE_S)
    responder = Responder(Security(key).psk, True, _WAY)
    while responder.agreed is None:
        try:
            sock.sendall(responder.take(_greeting(sock, responder.wanted)))
        except HandshakeError as error:
            sock.sendall(error.reply)
            raise
    agreed = responder.agreed
    return AgentChannel(sock, agreed.identity.decode(errors="replace"), agreed.sending, agreed.receiving)


def _greeting(sock: socket.socket, size: int) -> bytes:
    data = _exactly(sock, size)
    if data is None:
        raise HandshakeError("it ended the connection")
    return data


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    """Return so many bytes, None if the connection ends before."""
    parts, left = [], size
    while left:
        part = sock.recv(left)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
