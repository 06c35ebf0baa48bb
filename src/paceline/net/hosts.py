"""Addresses of this host, and whether two processes can share memory."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from paceline.config import Settings
from paceline.errors import ConfigError
from paceline.host.interfaces import address_of, source_address, tcp, with_scope
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Interval at which a name is asked for that is not known yet.
_RESOLVE_S = 0.5

#: Letters of states that mean something here; every other one is that of a process that waits.
_STATES = {
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "X",
}


def own_address(settings: Settings) -> str:
    """Return the address that this process binds and advertises.

    The setting ``host``, the address of ``interface``, or the source address of packets to the scheduler, whose name an
    engine may make known late: it is asked for until ``start_timeout_s`` have passed.

    Raises:
        ConfigError: the interface has no address, or the scheduler cannot be reached.
    """
    if settings.host:
        return settings.host
    if settings.interface:
        return address_of(settings.interface)
    target, until, has_said = urlsplit(settings.scheduler), time.monotonic() + settings.start_timeout_s, False
    while True:
        try:
            return source_address(target.hostname or "")
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() > until:
                raise ConfigError(f"the scheduler at {settings.scheduler} cannot be reached: {error}") from error
            if not has_said:
                has_said, limit_s = True, settings.start_timeout_s
                logger.warning("the scheduler's name %s is not known; asking for it for %g s", target.hostname, limit_s)
        time.sleep(_RESOLVE_S)


def server_addresses(settings: Settings) -> list[str]:
    """Return the addresses that a server binds: TCP, and an abstract unix socket, which leaves no file behind."""
    addresses = [tcp(own_address(settings), settings.ports or "*")]
    name = f"paceline-{secrets.token_hex(16)}"
    if settings.unix_sockets and _is_free(name):
        addresses.append(f"ipc://@{name}")
    return addresses


def _is_free(name: str) -> bool:
    """Tell whether an abstract unix socket can have a name. Only Linux has such sockets."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(b"\0" + name.encode())
    except OSError:
        return False
    return True


def address_for(member: m.Member, own_host_id: str, unix_sockets: bool) -> str:
    """Return the fastest of a server's addresses for a process on the host ``own_host_id``."""
    addresses = member.address.split()
    near = [one for one in addresses if one.startswith("ipc:") and unix_sockets and member.host_id == own_host_id]
    return (near or addresses)[0]


def bind_address(scheduler: str, ports: str = "") -> str:
    """Return the address that a scheduler binds that is advertised as ``tcp://name:port``.

    The name is resolved. A port of 0 is a free one, of the range ``ports`` if that is given.

    Raises:
        ConfigError: the address has another form, or the name does not resolve.
    """
    target = urlsplit(scheduler)
    try:
        port = target.port
    except ValueError:
        port = None
    if target.scheme != "tcp" or not target.hostname or port is None:
        raise ConfigError(f"scheduler address {scheduler!r} is not of the form tcp://host:port")
    try:
        resolved = socket.getaddrinfo(target.hostname, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise ConfigError(f"scheduler host {target.hostname!r} does not resolve: {error}") from error
    return tcp(with_scope(resolved), port or ports or "*")


def host_id() -> str:
    """Return an id that is the same for processes that can map each other's memory, and for no others.

    They have the same running kernel, process, network and user namespaces, and user.
    """
    parts = [str(os.geteuid()), socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/net", "/proc/self/ns/user"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text())
        except OSError:
            parts.append(f"unknown-{os.getpid()}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]


class ProcessState(NamedTuple):
    """The kernel's word on a process."""

    letter: str
    """As in /proc: R if any thread runs or waits for a processor, X if there is no process, "" if not known."""
    cpu_s: float = 0.0
    """CPU time that it has used, in seconds."""


def process_state(pid: int) -> ProcessState:
    """Return the state of a process of this host."""
    try:
        process = psutil.Process(pid)
        letter, times = _STATES.get(process.status(), "S"), process.cpu_times()
        is_ready = letter == "S" and any(_is_ready(thread.id) for thread in process.threads())
        return ProcessState("R" if is_ready else letter, times.user + times.system)
    except psutil.NoSuchProcess:
        with contextlib.suppress(OSError):  # this system has no /proc
            return ProcessState("" if psutil.pid_exists(pid) else "X")
    except (psutil.Error, OSError):
        pass
    return ProcessState("")


def is_gone(pid: int) -> bool:
    """Return whether a process of this host has ended, for sure."""
    try:
        return _STATES.get(psutil.Process(pid).status()) in ("Z", "X")
    except psutil.NoSuchProcess:
        return not psutil.pid_exists(pid)
    except (psutil.Error, OSError):
        return False


def _is_ready(thread: int) -> bool:
    """Tell whether a thread runs, or waits for a processor."""
    try:
        return bool(psutil.Process(thread).status() == psutil.STATUS_RUNNING)
    except psutil.NoSuchProcess:
        return False
