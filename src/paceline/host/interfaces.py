"""Network interfaces of this host, and the address that a process advertises."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple

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
    """Return all addresses of this host, IPv4 first; addresses that are valid on one link only are left out."""
    found = [
        Interface(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6) and not ipaddress.ip_address(one.address).is_link_local
    ]
    return sorted(found, key=lambda one: ":" in one.address)


def addresses_for_others() -> list[str]:
    """Return the addresses of this host but those of loopback."""
    return [one.address for one in interfaces() if not ipaddress.ip_address(one.address).is_loopback]


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
    """Return the address from which this host sends to the first of the targets that it can reach, or nothing."""
    for target in targets:
        with contextlib.suppress(OSError):
            return source_address(target)
    return ""


def source_address(host: str) -> str:
    """Return the address from which this host sends to another one; IPv4 where that has both.

    Raises:
        OSError: it has no address (``gaierror``), or there is no way to it.
    """
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, socket.AF_INET, socket.SOCK_DGRAM)
    except socket.gaierror:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def address_for_others(name: str) -> str:
    """Return the address by which other hosts reach this one: the one from which it sends to a host, perhaps itself.

    The own name of a host may be one of loopback there (``127.0.1.1`` on Debian): then it is that of an interface.
    """
    found = address_towards([name])
    if found == name or not (found == "" or ipaddress.ip_address(found).is_loopback):
        return found
    return next(iter(addresses_for_others()), found)


def tcp(host: str, port: int | str) -> str:
    """Return the address of a listener; its host may be an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _matches(address: str, wanted: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False
