"""Network interfaces of this host, and the address that a process advertises."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple

import psutil

from paceline.errors import ConfigError

#: Of a peer to which nothing is sent.
_ANY_PORT = 9


class Interface(NamedTuple):
    """One address of a network interface."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


def interfaces() -> list[Interface]:
    """Return all addresses of this host: IPv4 first, those that are valid on one link only last."""
    found = [
        Interface(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return sorted(found, key=lambda one: (ipaddress.ip_address(one.address).is_link_local, ":" in one.address))


def addresses_for_others() -> list[str]:
    """Return the addresses of this host except loopback's."""
    return [one.address for one in interfaces() if not _is_loopback(one.address)]


def address_of(wanted: str) -> str:
    """Return this host's address on an interface that is given by exact name, address, or network in CIDR form.

    Raises:
        ConfigError: there is none; the message lists the host's interfaces.
    """
    here = interfaces()
    for one in here:
        if one.name == wanted or _matches(one.address, wanted):
            return one.address
    known = ", ".join(map(str, here))
    raise ConfigError(f"interface {wanted!r} does not exist on {socket.gethostname()} or has no address; found {known}")


def address_towards(targets: Iterable[str]) -> str:
    """Return the address from which this host sends to the first of the targets that it can reach, or nothing.

    A target may be an address of another host that this host has, too: of loopback, or of a bridge for containers. It
    says nothing about the way to that host, so it counts only if no other target can be reached, loopback at last.
    """
    found: list[tuple[int, str]] = []
    for target in targets:
        with contextlib.suppress(OSError):
            source = source_address(target)
            doubt = 2 if _is_loopback(source) else 1 if source == target else 0
            if not doubt:
                return source
            found.append((doubt, source))
    return min(found, key=lambda one: one[0])[1] if found else ""


def source_address(host: str) -> str:
    """Return the address from which this host sends to another one; IPv4 where that has both.

    Raises:
        OSError: it has no address (``gaierror``), or there is no way to it.
    """
    host = with_own_scope(host)
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, socket.AF_INET, socket.SOCK_DGRAM)
    except socket.gaierror:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return with_scope(probe.getsockname())


def address_for_others(name: str) -> str:
    """Return the address by which other hosts reach this one: the one from which it sends to a host, perhaps itself.

    The own name of a host may be one of loopback there (``127.0.1.1`` on Debian): then it is an interface's.
    """
    found = address_towards([name])
    if found == name or not (found == "" or _is_loopback(found)):
        return found
    return next(iter(addresses_for_others()), found)


def with_scope(address: Any) -> str:
    """Return the host of a socket's address; a link-local one of IPv6 has the interface that it is valid on."""
    host, scope = str(address[0]), address[3] if len(address) == 4 else 0
    return f"{host}%{socket.if_indextoname(scope)}" if scope and "%" not in host else host


def with_own_scope(host: str) -> str:
    """Return an address that another host has told, as this host dials it.

    The interface in a link-local address of IPv6 (``fe80::1%eth0``) belongs to the host that told it. This host takes
    its own of that name, else its only one with such an address.
    """
    address, percent, told = host.partition("%")
    if not percent:
        return host
    own = [one.address.partition("%")[2] for one in interfaces() if one.address.startswith("fe80:")]
    return host if told in own or len(set(own)) != 1 else f"{address}%{own[0]}"


def tcp(host: str, port: int | str) -> str:
    """Return the address of a listener; its host may be an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _matches(address: str, wanted: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
