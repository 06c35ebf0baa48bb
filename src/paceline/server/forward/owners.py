"""A server's own requests to servers of other hosts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from paceline.errors import ProtocolError
from paceline.peer.connection import Connection
from paceline.peer.hosts import address_for
from paceline.peer.lifeline import identity
from paceline.transport import Hub
from paceline.transport.base import Frames
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

OnAnswer = Callable[[m.Body, Frames], None]

#: How often overdue answers are asked after.
LOOK_S = 0.5


class _Owner:
    """One server that is asked: requests wait until it knows who asks."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.admitted = False
        self.waiting: list[tuple[m.Request, Frames, OnAnswer]] = []


class OwnerClient:
    """Requests on behalf of workers, in the order in which they are made. Used by one thread.

    No request has a deadline here: the workers behind it have theirs, and ask who is missing when it has passed; of
    the death of a server everybody learns from the scheduler.

    Args:
        hub: a transport of its own.
        me: this server.
        servers: all servers of the job, in the order of ranks.
    """

    def __init__(self, hub: Hub, me: m.Member, servers: Sequence[m.Member]) -> None:
        self._hub, self._me, self._servers = hub, me, servers
        self._owners: dict[int, _Owner] = {}
        self._by_channel: dict[int, _Owner] = {}
        self._answers: dict[tuple[int, int], OnAnswer] = {}
        self._next_look = 0.0

    def ask(self, server: int, body: m.Request, frames: Frames, on_answer: OnAnswer) -> None:
        """Send a request; ``frames`` stay unchanged until :meth:`take` calls ``on_answer`` with the answer."""
        owner = self._owners.get(server) or self._connect(self._servers[server])
        if owner.admitted:
            self._send(owner.link, body, frames, on_answer)
        else:
            owner.waiting.append((body, frames, on_answer))

    def _connect(self, server: m.Member) -> _Owner:
        address = address_for(server, self._me.host_id, False)
        channel = self._hub.connect(address, identity("server"), bulk=True)
        owner = _Owner(Connection(self._hub, channel, f"server {server.rank} on {server.host}"))
        self._owners[server.rank] = self._by_channel[channel] = owner
        claim = m.Claim("server", self._me.rank, self._me.token)
        self._send(owner.link, claim, (), lambda body, frames: self._admitted(owner, body))
        return owner

    def _admitted(self, owner: _Owner, body: m.Body) -> None:
        owner.admitted = True
        waiting, owner.waiting = owner.waiting, []
        for request, frames, on_answer in waiting:
            if isinstance(body, m.Failed):
                on_answer(body, ())
            else:
                self._send(owner.link, request, frames, on_answer)

    def _send(self, link: Connection, body: m.Request, frames: Frames, on_answer: OnAnswer) -> None:
        seq = link.send(body, frames, time.monotonic())
        self._answers[link.channel, seq] = on_answer

    def take(self) -> None:
        """Use the answers that have arrived."""
        if not self._owners:
            return
        for channel, frames in self._hub.receive(0.0):
            self._use(channel, frames)
        now = time.monotonic()
        for channel in self._hub.reopened():
            self._by_channel[channel].link.probe(now, at_once=True)
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            for owner in self._owners.values():
                owner.link.probe(now)

    def _use(self, channel: int, frames: Frames) -> None:
        link = self._by_channel[channel].link
        try:
            taken = link.take(frames)
        except ProtocolError as error:
            # It is asked after like one that got lost.
            logger.warning("an answer of %s cannot be read: %s", link.name, error)
            return
        if taken is not None:
            seq, body, payload = taken
            on_answer = self._answers.pop((channel, seq), None)
            if on_answer is not None:
                on_answer(body, payload)

    def close(self) -> None:
        """Close the connections."""
        self._hub.close(linger_s=1.0)
