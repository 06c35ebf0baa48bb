"""What runs in a container: ``python -m paceline.launch.engines.yarn.container HOST:PORT NAME DIRECTORY``.

It connects to the launcher's hub, and runs an agent whenever a remote shell asks for one: once, and once more after
each restart of the job. The key is the variable ``PACELINE_HUB_KEY``, or in the file ``PACELINE_HUB_KEY_FILE``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from paceline.errors import PacelineError, ProtocolError
from paceline.launch.remote.shell import LEAVE_S, READ_BYTES, end
from paceline.net.handshake import GREETING_BYTES, Agreed, HandshakeError, Initiator, Way
from paceline.net.security import Security

KEY_VARIABLE, KEY_FILE_VARIABLE = "PACELINE_HUB_KEY", "PACELINE_HUB_KEY_FILE"

_LENGTH = struct.Struct("!I")
_LARGEST = 1 << 20
WAY = Way(is_unix=False, listener="hub")
_HANDSHAKE_S = 10.0
#: An idle connection to a machine that is gone ends after 10 + 4 * 5 s.
_KEEPALIVE = ((getattr(socket, "TCP_KEEPIDLE", 0x10), 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


def main(words: Sequence[str]) -> int:
    """Serve until the launcher is gone; return the exit code."""
    address, name, directory = words
    host, _, port = address.rpartition(":")
    try:
        key = _key()
    except OSError as error:
        print(f"the hub's key cannot be read: {error}; containers must run as the launcher's user", file=sys.stderr)
        return 1
    if not os.path.isdir(directory):
        print(f"this node has no directory {directory}: nodes must share it", file=sys.stderr)
        return 1
    served = False
    while True:
        try:
            channel = connect(host.strip("[]"), int(port), key, name)
        except (OSError, HandshakeError) as error:
            if served:  # the job is over
                return 0
            print(f"the launcher at {address} cannot be reached from here: {error}", file=sys.stderr)
            return 1
        try:
            _serve(channel, directory)
        except (OSError, PacelineError) as error:
            print(f"the connection to the launcher ended: {error}", file=sys.stderr)
        finally:
            channel.close()
        served = True


def _key() -> str:
    path = os.environ.pop(KEY_FILE_VARIABLE, "")
    return Path(path).read_text() if path else os.environ.pop(KEY_VARIABLE)


def _serve(channel: AgentChannel, directory: str) -> None:
    """Wait for a remote shell, and run an agent for it."""
    if channel.receive() is None:
        return
    agent = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline", "agent"], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    sender = threading.Thread(target=_send_output, args=[agent.stdout, channel], daemon=True)
    sender.start()
    try:
        while data := channel.receive():
            agent.stdin.write(data)
            agent.stdin.flush()
    finally:
        end(agent)
        sender.join(LEAVE_S)


def _send_output(stdout: IO[bytes], channel: AgentChannel) -> None:
    """Pass on an agent's output; its end ends the connection."""
    try:
        while data := os.read(stdout.fileno(), READ_BYTES):
            channel.send(data)
    except OSError:  # the launcher is gone; the agent learns it from its input
        pass
    channel.close()


# ---- the connection to the hub, sealed with keys of its own ----------------------------------------------------------


class AgentChannel:
    """One connection after its handshake. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, agreed: Agreed) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock, self._sending, self._receiving = sock, agreed.sending, agreed.receiving

    def send(self, data: bytes) -> None:
        """Send a frame; an empty one says that there is no more input."""
        for start in range(0, len(data), _LARGEST) or (0,):
            part = data[start : start + _LARGEST]
            length = _LENGTH.pack(len(part))
            self._sock.sendall(length + self._sending.seal(part))

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
        return None if record is None else self._receiving.open(record)

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
        initiator = Initiator(Security(key).psk, name.encode(), True, WAY)
        sock.sendall(initiator.hello())
        welcome = _exactly(sock, GREETING_BYTES)
        if welcome is None:
            raise HandshakeError("it ended the connection")
        join, agreed = initiator.take(welcome)
        sock.sendall(join)
        return AgentChannel(sock, agreed)
    except BaseException:
        sock.close()
        raise


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


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
