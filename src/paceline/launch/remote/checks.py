"""What an agent finds out about its host for ``paceline doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import selectors
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from paceline.errors import PacelineError
from paceline.interfaces import address_of, interfaces

_REACH_S = 3.0
_PACKAGES = ("paceline", "torch")


def facts(interface: str, witness: str) -> dict[str, Any]:
    """Return versions of packages, the interface's address, and whether a file of the launcher is in this directory.

    Args:
        interface: name, address or CIDR; empty: none is wanted.
        witness: name of the file.
    """
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    try:
        here = [one.address for one in interfaces() if not ip_address(one.address).is_loopback]
        found = address_of(interface) if interface else ", ".join(here[:2])
        problem = ""
    except PacelineError as error:
        found, problem = "", str(error)
    return {"versions": versions, "address": found, "problem": problem, "shared": os.path.exists(witness)}


def listen() -> socket.socket:
    """Return a socket that listens on every address of this host, on a free port."""
    return socket.create_server(("", 0), backlog=128)


def reach(targets: Sequence[Sequence[Any]]) -> dict[str, str]:
    """Connect to (host, address, port) of all others at once; return what went wrong by host, nothing if it went well.

    The deadline is for all of them together.
    """
    found: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        for host, address, port in targets:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            sock.setblocking(False)
            code = sock.connect_ex((address, port))
            found[host] = f"no answer within {_REACH_S:g} s"
            if code in (0, 115):  # EINPROGRESS
                selector.register(sock, selectors.EVENT_WRITE, host)
            else:
                found[host] = os.strerror(code)
                sock.close()
        while selector.get_map():
            ready = selector.select(_REACH_S)
            for key, _ in ready:
                sock = key.fileobj  # type: ignore[assignment]
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                found[key.data] = os.strerror(code) if code else ""
                selector.unregister(sock)
                sock.close()
            if not ready:
                for key in list(selector.get_map().values()):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
    return found
