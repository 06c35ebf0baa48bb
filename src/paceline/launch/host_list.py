"""Hosts of a job, and the forms in which users list them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import MOST_SPEED

LOCALHOST = "127.0.0.1"

#: ``name``, ``name:port``, ``[IPv6]`` or ``[IPv6]:port``, each with ``user@`` in front.
_NAME = re.compile(r"(?P<name>(?:[^\s@\[\]]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+))(?::(?P<number>\d+))?")
#: Signs that no name of a host has, and that a shell on the way would obey: ssh's ProxyCommand, qrsh, mpirun.
_SHELL = re.compile(r"""[\s'"`$;&<>|(){}]""")
#: Words after a host: the field that they set, and its type.
_KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "slots": ("slots", int), "weight": ("weight", float), "port": ("port", int), "group": ("group", str),
    "iface": ("interface", str), "interface": ("interface", str),
}  # fmt: skip
#: Words of Open MPI's hostfiles that change nothing here.
_IGNORED = frozenset({"max_slots", "max-slots"})


@dataclass(frozen=True)
class Host:
    """A host as the user names it.

    Raises:
        ValueError: no name, or a number that cannot be.
    """

    name: str
    """Name, address or alias of the user's ssh configuration, ``user@`` included."""
    port: int | None = None
    """Port of its ssh server; None: the port in the user's ssh configuration."""
    slots: int | None = None
    """How many workers it may run; None: any number."""
    weight: float = 1.0
    """Speed relative to other hosts."""
    group: str = ""
    """Worker group that runs here; empty: every group that names no hosts."""
    interface: str = ""
    """Network interface by name, address or CIDR; empty: the job's."""

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("-") or "@-" in self.name or _SHELL.search(self.name):
            raise ValueError(f"{self.name!r} is not the name of a host")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"host {self.name}: port {self.port} does not exist")
        if self.slots is not None and self.slots < 0:
            raise ValueError(f"host {self.name}: slots={self.slots}; it is 0 or more")
        if not 0 < self.weight <= MOST_SPEED:
            raise ValueError(f"host {self.name}: weight={self.weight:g}; it is above 0, and at most {MOST_SPEED:g}")

    def __str__(self) -> str:
        return self.name


def parse_hosts(text: str, source: str, *, number_is_slots: bool = False) -> tuple[Host, ...]:
    """Read a hostfile: a host per line, ``#`` starts a comment. A host on several lines has their slots together.

    The forms: ``host[:port] [slots=4] [weight=3] [group=a] [iface=eth1]`` and its parts, which are those of MXNet
    (``host``, ``host:port``) and Open MPI (``host slots=4``); with ``number_is_slots``, MPICH's ``host:slots``.

    Raises:
        ValueError: a line has another form, or no line names a host; the message has ``source`` and the line's number.
    """
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if words:
            try:
                host = _host(words, number_is_slots)
                found[host.name] = _together(found[host.name], host) if host.name in found else host
            except ValueError as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{source} names no host; write one per line, as in: node1 slots=4")
    return tuple(found.values())


def parse_host_list(text: str, *, number_is_slots: bool = False) -> tuple[Host, ...]:
    """Read hosts that a comma separates, as in ``h1,h2:2222``."""
    lines = "\n".join(text.split(","))
    return parse_hosts(lines, f"the list of hosts {text!r}", number_is_slots=number_is_slots)


def with_default_interface(hosts: Iterable[Host], interface: str) -> tuple[Host, ...]:
    """Return the hosts; those without an interface get this one."""
    return tuple(host if host.interface else replace(host, interface=interface) for host in hosts)


def _together(first: Host, second: Host) -> Host:
    """Merge two lines of one host: every line is a slot if neither says how many (MXNet starts as many there).

    Raises:
        ValueError: they say unlike things of it.
    """
    if first.port != second.port:
        raise ValueError(
            f"host {first.name} was there with another port, and a host is known by its name: several machines behind "
            "one address need names of their own in ~/.ssh/config (Host, HostName, Port)"
        )
    if replace(first, slots=None) != replace(second, slots=None):
        raise ValueError(f"host {first.name} was there with another weight, group or interface; a host has one of each")
    return replace(first, slots=sum(1 if one.slots is None else one.slots for one in (first, second)))


def _host(words: list[str], number_is_slots: bool) -> Host:
    match = _NAME.fullmatch(words[0])
    if match is None:
        raise ValueError(f"{words[0]!r} is not a host or host:port (IPv6 addresses stand in brackets)")
    name = re.sub(r"[\[\]]", "", match["name"])
    number = int(match["number"]) if match["number"] else None
    host = Host(name, slots=number) if number_is_slots else Host(name, port=number)
    for word in words[1:]:
        host = _with(host, word)
    return host


def _with(host: Host, word: str) -> Host:
    key, _, value = word.partition("=")
    if key in _IGNORED and value.isdecimal():
        return host
    try:
        if value and key in _KEYS:
            name, kind = _KEYS[key]
            return replace(host, **{name: kind(value)})
    except ValueError as error:
        raise ValueError(f"{word}: {error}" if str(error).startswith("host ") else f"{word} is not a number") from None
    raise ValueError(f"{word!r} is not understood; after a host: slots=4, weight=3, group=a, iface=eth1, port=22")
