"""Network interfaces of this host, and the address that a process advertises."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from paceline.errors import ConfigError

_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER, _ADDRESS, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_SCOPE_LINK = 253


class Interface(NamedTuple):
    """One address of a network interface."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


def interfaces() -> list[Interface]:
    """Return all addresses of this host, IPv4 first; addresses that are valid on one link only are left out."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(_HEADER.pack(_HEADER.size + _ADDRESS.size, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + bytes(8))
        found: list[Interface] = []
        while _parse(netlink.recv(65536), found):
            pass
    return sorted(found, key=lambda one: ":" in one.address)


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
        try:
            family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _matches(address: str, wanted: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _parse(data: bytes, found: list[Interface]) -> bool:
    """Read netlink messages; return whether more follow."""
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if kind != _RTM_NEWADDR:
            return False
        family, _, _, scope, index = _ADDRESS.unpack_from(data, _HEADER.size)
        attributes = _attributes(data[_HEADER.size + _ADDRESS.size : length])
        raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        if raw and scope != _SCOPE_LINK and family in (socket.AF_INET, socket.AF_INET6):
            found.append(Interface(socket.if_indextoname(index), socket.inet_ntop(family, raw)))
        data = data[(length + 3) & ~3 :]
    return True


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        found[kind] = data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
    return found
