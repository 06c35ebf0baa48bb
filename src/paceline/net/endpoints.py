"""Sockets: addresses, and the kernel's knowledge of the host at the other end.

Addresses are ``tcp://host:port``, and ``ipc://@name`` for abstract unix sockets of this host. A process may listen at
any port (``tcp://host:*``), or at a free one of a range (``tcp://host:20000-20099``).

The kernels of two connected hosts talk without any process: each acknowledges the other's packets. With keepalive they
do so once in a second also without messages. So a host that was not heard is down or unreachable, whatever its
processes do; and a silent process on a host that was heard is stalled or stopped.

| time | must exceed |
|---|---|
| :data:`BULK_TIMEOUT_S` | a long pause of a process, which leaves messages unread |
| a member's ``heartbeat_timeout_s`` | :data:`KEEPALIVE_S` and the time to send a lost packet again, at most 1 s |
| :data:`CONTROL_TIMEOUT_S` | any ``heartbeat_timeout_s``: membership decides who is dead, not the kernel |
| a request's ``timeout_s`` | :data:`BULK_TIMEOUT_S`, so that it is sent again over a new connection |

This knowledge exists on Linux only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import sys
import termios
import time
from typing import Any
from urllib.parse import urlsplit

from paceline.config import port_range
from paceline.host import forks
from paceline.host.interfaces import tcp, with_own_scope, with_scope

#: Connections that the kernel holds until the gate accepts them.
_BACKLOG = 4096

#: How long the kernels of two hosts may take to connect. It exceeds two lost packets; then another try begins.
CONNECT_S = 5.0

#: Seconds without a packet from the other host, after which the kernel asks for one; again after as long.
KEEPALIVE_S = 1

#: A connection for tensors ends when sent bytes are not acknowledged, or not taken, for as long. It is made again.
BULK_TIMEOUT_S = 60.0

#: The same for connections whose loss may mean a death.
CONTROL_TIMEOUT_S = 24 * 3600.0

#: Longest time after which an unanswered packet is sent again; doubling times would double every outage. Linux 6.15.
_TCP_RTO_MAX_MS, RTO_MAX_MS = 44, 1000

_TCP_KEEPIDLE = getattr(socket, "TCP_KEEPIDLE", 4)

_INT = struct.Struct("=i")

#: ``struct tcp_info`` of linux/tcp.h, as far as it is used: packets in flight, milliseconds since data and since an
#: acknowledgement came, bytes that were acknowledged.
_TCP_INFO = struct.Struct("=24xI24x2I60xQ")


def _unix_name(address: str) -> bytes:
    """Return the name of an abstract unix socket, which leaves no file behind."""
    name = address.removeprefix("ipc://@")
    if name == address:
        raise OSError(f"{address} is no address of a socket; those are tcp://host:port and ipc://@name")
    return b"\0" + name.encode()


def _host_and_port(address: str) -> tuple[str, int]:
    target = urlsplit(address)
    return target.hostname or "", target.port or 0


def _listening_at(address: str) -> socket.socket:
    """Return a socket that listens at an address of TCP; of a range of ports at the first free one."""
    host, _, last = address.removeprefix("tcp://").rpartition(":")
    host, ports = host.strip("[]"), port_range(last) if "-" in last else [int(last.replace("*", "0"))]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or len(ports) == 1:
                raise
    raise OSError(errno.EADDRINUSE, "no port of the range is free")


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket and the address that reaches it.

    Raises:
        OSError: the address cannot be listened at; the text names it.
    """
    try:
        if not address.startswith("tcp:"):
            sock = _socket(socket.AF_UNIX)
            sock.bind(_unix_name(address))
            sock.listen(_BACKLOG)
            return sock, address
        with forks.held():
            sock = _listening_at(address)
            forks.in_children(sock, socket.socket.close)
        bound = sock.getsockname()
        return sock, tcp(with_scope(bound), bound[1])
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {address}: {error.strerror or error}") from error


def dial(address: str) -> socket.socket:
    """Return a socket that is connected to a listening one, with a time limit for the next steps.

    Raises:
        OSError: no process listens there.
    """
    if not address.startswith("tcp:"):
        return _connected(socket.AF_UNIX, _unix_name(address))
    reason = OSError(f"{address} has no address")
    host, port = _host_and_port(address)
    for family, _, _, _, target in socket.getaddrinfo(with_own_scope(host), port, type=socket.SOCK_STREAM):
        try:
            return _connected(family, target)
        except OSError as error:
            reason = error
    raise reason


def _connected(family: int, target: Any) -> socket.socket:
    sock = _socket(family)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock


def _socket(family: int) -> socket.socket:
    """Return a new socket, which children of this process close."""
    with forks.held():
        return forks.in_children(socket.socket(family, socket.SOCK_STREAM), socket.socket.close)


def end(sock: socket.socket) -> None:
    """End a connection that another thread reads, which then closes the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def tune(sock: socket.socket, bulk: bool) -> None:
    """Have messages leave at once, and have the kernel watch the other host."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux
        timeout_ms = round(1000 * (BULK_TIMEOUT_S if bulk else CONTROL_TIMEOUT_S))
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_KEEPIDLE, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, RTO_MAX_MS)


def unsent_bytes(sock: socket.socket) -> int:
    """Return how many bytes that this kernel has taken the other one does not have yet; 0 where that is not known."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError):  # it is closed
            return int(_INT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT.size)))[0])
    return 0


class HostWatch:
    """Tells for how long the host at the other end of a connection is silent."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._acknowledged, self._since = -1, 0.0

    def silent_s(self) -> float | None:
        """Return the seconds since the kernel of the other host was heard, or acknowledged sent bytes.

        The second is seen only by calling this again and again. Without it a network that carries one way only would
        look sound at the end that hears. None: not known.
        """
        if self._socket.family == socket.AF_UNIX:
            return 0.0
        if not hasattr(socket, "TCP_INFO"):  # of Linux
            return None
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # closed
            return None
        if len(info) < _TCP_INFO.size:
            return None
        in_flight, data_ms, ack_ms, acknowledged = _TCP_INFO.unpack(info)
        now = time.monotonic()
        if in_flight == 0 or acknowledged != self._acknowledged:
            self._acknowledged, self._since = acknowledged, now
        return max(float(min(data_ms, ack_ms)) / 1000, now - self._since)
