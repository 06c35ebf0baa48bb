"""The owners of buckets, as a server of another host asks them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.net import Hub
from paceline.net.base import Frames
from paceline.net.call import OnAnswer
from paceline.net.client import Client
from paceline.net.hosts import address_for
from paceline.wire import messages as m


class OwnerClient:
    """Asks servers by their rank, and connects to each when it is first asked. Used by one thread.

    No request has a deadline: the workers behind it have theirs, and ask who is missing when it has passed. The
    scheduler tells everybody of the death of a server.

    Args:
        hub: a transport of its own.
        me: this server.
        servers: all servers of the job, by rank.
    """

    def __init__(self, hub: Hub, me: m.Member, servers: Sequence[m.Member]) -> None:
        self._me, self._servers = me, servers
        self._client = Client(hub)
        self._channels: dict[int, int] = {}

    def ask(self, server: int, body: m.Request, frames: Frames, on_answer: OnAnswer) -> None:
        """Send a request; requests to one server arrive there in the order of asking.

        Args:
            server: rank of the server.
            body: the request.
            frames: payload; unchanged until the answer.
            on_answer: called by :meth:`poll` with the answer, which may be a failure.
        """
        if server not in self._channels:
            self._channels[server] = self._connect(self._servers[server])
        what = type(body).__name__
        self._client.ask(self._channels[server], body, what, frames, on_answer, lambda failure: on_answer(failure, ()))

    def _connect(self, server: m.Member) -> int:
        address = address_for(server, self._me.host_id, False)
        channel = self._client.connect(address, "server", f"server {server.rank}", f"on {server.host}", bulk=True)
        self._client.claim(channel, m.Claim("server", self._me.rank, self._me.token))
        return channel

    def poll(self) -> None:
        """Use the answers that have arrived, without waiting."""
        if self._channels:
            self._client.poll()
