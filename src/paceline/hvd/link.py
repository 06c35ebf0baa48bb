"""A rank's way to the coordinator. It outlives ``shutdown``, so that the next ``init`` need not connect again."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import time
from abc import ABC, abstractmethod

from paceline import config
from paceline.errors import AuthenticationError, JoinTimeoutError
from paceline.hvd import rendezvous
from paceline.hvd.coordinator import Coordinator, coordinator_name, identity
from paceline.hvd.environment import HvdSettings, ProcessPlace
from paceline.hvd.negotiation.messages import Down, ToCoordinator, ToRank, decode, encode
from paceline.hvd.timeline import Timeline
from paceline.peer.hosts import own_address, tcp
from paceline.transport.security import Security
from paceline.transport.sockets import SocketHub
from paceline.worker.current import current_session

#: How long an address may refuse connections before it counts as one of an earlier job.
_STALE_S = 2.0

#: Part of the start timeout after which one that only does not answer does: its host may be busy.
_SLOW_SHARE = 4


class CoordinatorLink(ABC):
    """Sends to the coordinator and receives from it. Used by one thread, except :meth:`wake`.

    Attributes:
        security: of the connections of all ranks.
    """

    security: Security

    @abstractmethod
    def send(self, message: ToCoordinator) -> None:
        """Send a message."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[ToRank]:
        """Return messages, after waiting at most ``timeout_s`` for the first."""

    @abstractmethod
    def wake(self) -> None:
        """Make :meth:`receive` return now."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @property
    def is_open(self) -> bool:
        """Whether the coordinator can still be reached."""
        return True

    def configure(self, hvd: HvdSettings) -> None:  # noqa: B027 (only rank 0's link has something to do)
        """Use these settings from the next generation on, if this is rank 0."""

    def missing(self) -> str:
        """Return the ranks that have not called ``init``, where that is known."""
        return ""


class OwnCoordinator(CoordinatorLink):
    """Rank 0's: the coordinator is in the same process."""

    def __init__(self, place: ProcessPlace, settings: config.Settings, hvd: HvdSettings, timeline: Timeline) -> None:
        self._inbox: queue.SimpleQueue[ToRank | None] = queue.SimpleQueue()
        self._coordinator: Coordinator | None = None
        self._place = place
        self._meeting: rendezvous.CoordinatorAddress | None = None
        self.security = security = rendezvous.security_of(place, settings) if place.size > 1 else Security("")
        addresses = _addresses(place, settings) if place.size > 1 else []
        self._coordinator = Coordinator(
            place.size, addresses, security, coordinator_name(place.job), hvd, self._inbox.put, timeline
        )
        if place.size > 1:
            self._meeting = rendezvous.CoordinatorAddress(self._coordinator.addresses[0], security)
            rendezvous.publish(place, settings, self._meeting)

    def configure(self, hvd: HvdSettings) -> None:
        """Use these settings from the next generation on."""
        assert self._coordinator is not None
        self._coordinator.settings = hvd

    def send(self, message: ToCoordinator) -> None:
        """Give a message to the coordinator, in this thread."""
        assert self._coordinator is not None
        self._coordinator.take(0, message)

    def receive(self, timeout_s: float) -> list[ToRank]:
        """Return messages."""
        found = []
        try:
            one = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if one is not None:
                    found.append(one)
                one = self._inbox.get_nowait()
        except queue.Empty:
            return found

    def wake(self) -> None:
        """Make :meth:`receive` return now."""
        self._inbox.put(None)

    def close(self) -> None:
        """Close all ranks' connections."""
        assert self._coordinator is not None
        self._coordinator.close()
        if self._meeting is not None and self._place.on_one_host:
            rendezvous.withdraw(self._place, self._meeting)

    def missing(self) -> str:
        """Return the ranks that have not called ``init``."""
        assert self._coordinator is not None
        return ", ".join(map(str, self._coordinator.missing()))


class RankConnection(CoordinatorLink):
    """A connection to rank 0.

    Raises:
        AuthenticationError: rank 0 has another key.
        JoinTimeoutError: rank 0 was not found in time.
    """

    def __init__(self, place: ProcessPlace, settings: config.Settings) -> None:
        deadline = time.monotonic() + settings.start_timeout_s
        for meeting in rendezvous.candidates(place, settings):
            self.security = meeting.security
            self._hub = SocketHub(meeting.security)
            self._channel = self._hub.connect(meeting.address, identity(place.rank), coordinator_name(place.job))
            began = time.monotonic()
            while (now := time.monotonic()) < deadline:
                if self._hub.is_open(self._channel):
                    self._was_open = True
                    return
                refused = self._hub.refused(self._channel)
                if refused and not place.on_one_host:
                    self._hub.close()
                    raise AuthenticationError(f"rank 0 at {meeting.address} refuses rank {place.rank}: {refused}")
                is_refused = bool(refused) or self._hub.is_deserted(self._channel)
                limit_s = _STALE_S if is_refused else settings.start_timeout_s / _SLOW_SHARE
                if place.on_one_host and now - began > limit_s:
                    break
                self._hub.receive(0.02)
            self._hub.close()
        raise JoinTimeoutError(f"rank {place.rank} could not connect to rank 0 within {settings.start_timeout_s:g} s")

    @property
    def is_open(self) -> bool:
        """Whether the connection has never been lost."""
        return self._was_open and self._hub.is_open(self._channel)

    def send(self, message: ToCoordinator) -> None:
        """Send a message."""
        self._hub.send(self._channel, [encode(message)])

    def receive(self, timeout_s: float) -> list[ToRank]:
        """Return messages; a ``Down`` when the connection is lost."""
        found = [decode(ToRank, frames[0]) for _, frames in self._hub.receive(timeout_s)]
        if not self._hub.is_open(self._channel) and self._was_open:
            self._was_open = False
            found.append(ToRank(0, Down(0, "rank 0, where the coordinator runs, ended or lost its connection")))
        return found

    def wake(self) -> None:
        """Make :meth:`receive` return now."""
        self._hub.wake()

    def close(self) -> None:
        """Close the connection, when what was sent has left."""
        self._hub.close(linger_s=1.0)


def connect(place: ProcessPlace, settings: config.Settings, hvd: HvdSettings, timeline: Timeline) -> CoordinatorLink:
    """Return this rank's link. In a job of ``paceline launch`` the process joins that job, too."""
    if settings.scheduler:
        current_session()
    return OwnCoordinator(place, settings, hvd, timeline) if place.rank == 0 else RankConnection(place, settings)


def _addresses(place: ProcessPlace, settings: config.Settings) -> list[str]:
    if place.on_one_host:
        return [f"ipc://@paceline-hvd-{secrets.token_hex(16)}"]
    if settings.host or settings.interface or settings.scheduler:
        return [tcp(own_address(settings), "*")]
    return [tcp(_route_to_here(), "*")]


def _route_to_here() -> str:
    """Return an address of this host that others can reach: that of MASTER_ADDR, else of the host's name."""
    return socket.gethostbyname(os.environ.get("MASTER_ADDR") or socket.gethostname())
