"""How ranks find the coordinator, which runs in rank 0, and how they get the key of its connections.

| started by | address of the coordinator | key |
|---|---|---|
| ``paceline launch`` with a scheduler | gathered through the scheduler | the job's key |
| anything, all ranks on one host | a file that only this user can read | the job's key, or a new one in that file |
| anything, several hosts | a ``TCPStore`` at MASTER_ADDR and MASTER_PORT, sealed | PACELINE_JOB_KEY in all processes |

Whoever reaches a ``TCPStore`` can write there, so an address that no holder of the key has sealed is refused. One of an
earlier job of the same name and key, written there again, leads to somebody who must prove to hold the key.

A file of an earlier job with the same name is noticed by its address, which has no listener.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from paceline.collectives.environment import ProcessPlace
from paceline.collectives.errors import HVD, STORE
from paceline.config import Settings
from paceline.errors import AuthenticationError, ConfigError, JoinTimeoutError
from paceline.host.interfaces import address_for_others
from paceline.host.user_folder import private
from paceline.net.aead import TamperedError, open_value, seal_value
from paceline.net.hosts import own_address
from paceline.net.security import Security, new_job_key
from paceline.worker.current import current_session

_POLL_S = 0.01


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where the coordinator listens, and the key that its connections need."""

    address: str
    security: Security


def private_folder() -> Path:
    """Return the folder of this user where the ranks of a host meet.

    Raises:
        LaunchError: somebody else made it.
    """
    path = Path(tempfile.gettempdir(), f"paceline-hvd-{os.geteuid()}")
    return private(path, "TMPDIR, to the same folder for all ranks of this host")


def address_here(settings: Settings) -> str:
    """Return the address of this host by which other hosts reach it."""
    if settings.host or settings.interface or settings.scheduler:
        return own_address(settings)
    return address_for_others(os.environ.get("MASTER_ADDR") or socket.gethostname())


def meeting_file(place: ProcessPlace) -> Path:
    """Return the file by which the ranks of a job on one host meet."""
    return private_folder() / f"{hashlib.sha256(place.job.encode()).hexdigest()[:32]}.json"


def security_of(place: ProcessPlace, settings: Settings) -> Security:
    """Return rank 0's security: the job's key, or a new one where all ranks are on one host.

    Raises:
        ConfigError: there is no key, and no safe way to pass one.
    """
    if settings.job_key or settings.insecure:
        return Security.of(settings)
    if place.on_one_host:
        return Security(new_job_key(), settings.encrypt)
    raise ConfigError(
        "ranks on several hosts need a key: set PACELINE_JOB_KEY to the same new key in all processes (python -c "
        "'import paceline.net.security as s; print(s.new_job_key())'), or PACELINE_INSECURE=1 on a network that "
        "nobody else can reach"
    )


def publish(place: ProcessPlace, settings: Settings, meeting: CoordinatorAddress) -> None:
    """Tell the other ranks (rank 0 calls this)."""
    if settings.scheduler and place.is_whole:
        current_session().gather(f"hvd {place.job}", meeting.address.encode())
    elif place.on_one_host:
        path = meeting_file(place)
        text = json.dumps({"address": meeting.address, "key": meeting.security.job_key})
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    else:
        _store(place, settings).set(_entry(place), _sealed(place, meeting))


def withdraw(place: ProcessPlace, meeting: CoordinatorAddress) -> None:
    """Remove the file that :func:`publish` has written, unless another job of this name has written its own since."""
    path = meeting_file(place)
    with contextlib.suppress(FileNotFoundError):
        if json.loads(path.read_text())["address"] == meeting.address:
            path.unlink()


def candidates(place: ProcessPlace, settings: Settings) -> Iterator[CoordinatorAddress]:
    """Yield where the coordinator may be, on one host as often as asked: that may change. All ranks but 0 call this.

    Raises:
        JoinTimeoutError: rank 0 did not publish an address within ``start_timeout_s``.
        AuthenticationError: its publisher does not hold the job's key.
    """
    if settings.scheduler and place.is_whole:
        addresses = current_session().gather(f"hvd {place.job}", b"")
        yield CoordinatorAddress(addresses[0].decode(), Security.of(settings))
    elif place.on_one_host:
        yield from _from_file(place, settings)
    else:
        security = security_of(place, settings)
        yield _opened(place, _store(place, settings).get(_entry(place)), security)
    raise JoinTimeoutError(
        f"rank {place.rank} did not find rank 0 of {place.size} within {settings.start_timeout_s:g} s; "
        f"do all ranks call {HVD.join}, or all of them {STORE.join}?"
    )


def _from_file(place: ProcessPlace, settings: Settings) -> Iterator[CoordinatorAddress]:
    path = meeting_file(place)
    deadline = time.monotonic() + settings.start_timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            content = json.loads(path.read_text())
            yield CoordinatorAddress(content["address"], Security(content["key"], settings.encrypt))
        time.sleep(_POLL_S)


def _entry(place: ProcessPlace) -> str:
    return f"paceline-hvd {place.job}"


def _sealed(place: ProcessPlace, meeting: CoordinatorAddress) -> str:
    key = meeting.security.value_key
    if not key:
        return meeting.address
    return base64.b64encode(seal_value(key, meeting.address.encode(), _entry(place).encode())).decode()


def _opened(place: ProcessPlace, text: bytes, security: Security) -> CoordinatorAddress:
    key = security.value_key
    try:
        address = open_value(key, base64.b64decode(text), _entry(place).encode()) if key else text
    except (TamperedError, ValueError):
        raise AuthenticationError(
            f"rank {place.rank} does not trust the address of rank 0 in the store at MASTER_ADDR and MASTER_PORT: "
            "who wrote it does not hold this job's key. Give all processes the same PACELINE_JOB_KEY, and "
            "PACELINE_INSECURE equal everywhere. If they have that, somebody else has written there"
        ) from None
    return CoordinatorAddress(address.decode(), security)


def _store(place: ProcessPlace, settings: Settings) -> TCPStore:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            "ranks on several hosts find each other by MASTER_ADDR and MASTER_PORT, a number; set them in all, not "
            f"{host!r} and {port!r}"
        )
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=settings.start_timeout_s)
    store = TCPStore(host, int(port), is_master=serves, timeout=timeout, wait_for_workers=False)
    _stores.append(store)
    return store


#: Stores that other ranks may still read; they end with the process.
_stores: list[object] = []
