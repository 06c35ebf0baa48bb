"""Addresses and sockets: ``tcp://host:port``, and ``ipc://@name`` for abstract unix sockets of this host."""

from __future__ import annotations

import contextlib
import socket
from typing import Any
from urllib.parse import urlsplit

from paceline import forks
from paceline.net.admission import HANDSHAKE_S

#: Connections that the kernel holds until the gate accepts them.
_BACKLOG = 4096


def _unix_name(address: str) -> bytes:
    """Return the name of an abstract unix socket, which leaves no file behind."""
    name = address.removeprefix("ipc://@")
    if name == address:
        raise OSError(f"{address} is no address of a socket; those are tcp://host:port and ipc://@name")
    return b"\0" + name.encode()


def _host_and_port(address: str) -> tuple[str, int]:
    target = urlsplit(address.replace(":*", ":0"))
    return target.hostname or "", target.port or 0


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
        host, port = _host_and_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with forks.held():
            sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            forks.in_children(sock, socket.socket.close)
        bound = sock.getsockname()
        return sock, f"tcp://[{bound[0]}]:{bound[1]}" if ":" in host else f"tcp://{bound[0]}:{bound[1]}"
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {address}: {error.strerror or error}") from error


def dial(address: str) -> socket.socket:
    """Return a socket that is connected to a listening one, with a time limit for what comes next.

    Raises:
        OSError: nobody listens there.
    """
    if not address.startswith("tcp:"):
        return _connected(socket.AF_UNIX, _unix_name(address))
    reason = OSError(f"{address} has no address")
    for family, _, _, _, target in socket.getaddrinfo(*_host_and_port(address), type=socket.SOCK_STREAM):
        try:
            return _connected(family, target)
        except OSError as error:
            reason = error
    raise reason


def _connected(family: int, target: Any) -> socket.socket:
    sock = _socket(family)
    try:
        sock.settimeout(HANDSHAKE_S)
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
