"""A rank's way to the coordinator, and its entry into a job. The way outlives ``shutdown``, for the next ``init``."""

from __future__ import annotations

import secrets
import time
from typing import TypeAlias

from paceline import config
from paceline.collectives import rendezvous
from paceline.collectives.coordinator import Coordinator, coordinator_name, identity
from paceline.collectives.environment import HvdSettings, ProcessPlace
from paceline.collectives.errors import CollectiveError
from paceline.collectives.negotiation.messages import Down, Entered, RankEntered, ToCoordinator, ToRank, decode, encode
from paceline.collectives.timeline import Timeline
from paceline.errors import JoinTimeoutError
from paceline.host.interfaces import tcp
from paceline.net.security import Security
from paceline.net.sockets import SocketHub
from paceline.worker.current import current_session

#: How long an address may refuse connections before it counts as one of an earlier job.
_STALE_S = 2.0

#: Part of the start timeout after which one that only does not answer does: its host may be busy.
_SLOW_SHARE = 4

#: Longest wait for a message of the coordinator at once.
_LOOK_S = 1.0


class RankConnection:
    """The connection of another rank than 0 to the coordinator. Used by one thread at a time, except :meth:`wake`.

    Raises:
        AuthenticationError: rank 0 has another key.
        RendezvousError: rank 0 is a process of another release.
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
                    raise refused.for_caller(f"rank 0 at {meeting.address}")
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
        """Close the connection, once all messages have left."""
        self._hub.close(linger_s=1.0)


#: A rank's way to the coordinator: in rank 0 the coordinator itself.
CoordinatorLink: TypeAlias = Coordinator | RankConnection


def enter(
    link: CoordinatorLink, generation: int, rank: int, size: int, mine: RankEntered, settings: HvdSettings
) -> tuple[Entered, list[ToRank]]:
    """Wait until all ranks have called ``init``.

    Returns:
        What all ranks have said, and the messages that came behind that.

    Raises:
        JoinTimeoutError: some did not call it in time.
        CollectiveError: ranks disagree, or one ended.
    """
    link.send(ToCoordinator(generation, mine))
    timeout_s, interface = settings.start_timeout_s, settings.interface
    deadline = time.monotonic() + timeout_s
    while True:
        messages = link.receive(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
        for place, message in enumerate(messages):
            if message.generation not in (0, generation):
                continue
            if isinstance(message.body, Down):
                raise CollectiveError(message.body.text(interface))
            assert isinstance(message.body, Entered)
            return message.body, messages[place + 1 :]
        if time.monotonic() >= deadline:
            missing = link.missing() if isinstance(link, Coordinator) else ""
            who = f"rank {missing}" if missing else "other ranks"
            raise JoinTimeoutError(f"rank {rank}: {who} of {size} did not call {interface.join} within {timeout_s:g} s")


def connect(place: ProcessPlace, settings: config.Settings, hvd: HvdSettings, timeline: Timeline) -> CoordinatorLink:
    """Return this rank's link. In a job of ``paceline launch`` the process joins that job, too."""
    if settings.scheduler:
        current_session()
    if place.rank:
        return RankConnection(place, settings)
    if place.size == 1:
        return Coordinator(place, [], Security(""), hvd, timeline)
    security = rendezvous.security_of(place, settings)
    here = f"ipc://@paceline-hvd-{secrets.token_hex(16)}"
    address = here if place.on_one_host else tcp(rendezvous.address_here(settings), settings.ports or "*")
    coordinator = Coordinator(place, [address], security, hvd, timeline)
    rendezvous.publish(place, settings, coordinator.meeting)
    return coordinator
