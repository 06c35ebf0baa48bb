"""A member's connection to the scheduler: joining, heartbeats, and news of deaths, on a thread of its own."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from paceline.config import Settings
from paceline.errors import AuthenticationError, JoinTimeoutError, PacelineError, PeerDiedError, RendezvousError
from paceline.membership import describe
from paceline.peer.connection import Connection
from paceline.peer.errors_by_name import rebuild
from paceline.peer.hosts import host_id, own_address
from paceline.transport import Hub
from paceline.wire import messages as m

logger = logging.getLogger(__name__)


def identity(role: str) -> bytes:
    """Return a new name for a connection, that no other connection has."""
    return f"{role}-{os.getpid()}-{secrets.token_hex(8)}".encode()


def raise_if_refused(hub: Hub, channel: int, whom: str) -> None:
    """Raise if the other side does not let this process in.

    Raises:
        AuthenticationError: with what to do.
    """
    reason = hub.refused(channel)
    if reason:
        raise AuthenticationError(
            f"{whom} refuses this process: {reason}. Start it with the job's own PACELINE_JOB_KEY "
            "(paceline launch sets it), and PACELINE_INSECURE equal everywhere"
        )


class Lifeline:
    """Joins the job and stays in it.

    Args:
        settings: of this process.
        hub: a transport of its own.
        address: where this process listens, if it is a server.
        on_news: called on the lifeline's thread when :attr:`failure` or :attr:`shutdown` changes.
    """

    def __init__(
        self, settings: Settings, hub: Hub, address: str = "", on_news: Callable[[], None] = lambda: None
    ) -> None:
        self._settings, self._hub, self._on_news = settings, hub, on_news
        self._hello = m.Hello(
            m.PROTOCOL, settings.job_id, settings.role, settings.rank, settings.local_rank, own_address(settings),
            host_id(), os.getpid(), address, settings.num_workers, settings.num_servers,
        )  # fmt: skip
        self._link = Connection(
            hub, hub.connect(settings.scheduler, identity(settings.role)), f"scheduler at {settings.scheduler}"
        )
        self._thread = threading.Thread(target=self._run, name="paceline-lifeline", daemon=True)
        self._bye: str | None = None
        self._left = threading.Event()
        self.round = 0
        """Reported with every heartbeat."""
        self.failure: PacelineError | None = None
        self.shutdown = False
        self.deaths: list[m.Death] = []
        self.left: frozenset[int] = frozenset()
        """Ranks of the workers that have left."""
        self.rank = -1
        self.members: list[m.Member] = []

    def join(self) -> None:
        """Join the job, wait until all members are there, and begin to send heartbeats.

        Raises:
            AuthenticationError: the scheduler does not admit this process.
            RendezvousError: refused, or not everybody came in time.
        """
        # The scheduler knows best who is missing and says so at its own deadline; ours only catches its absence.
        deadline = time.monotonic() + self._settings.start_timeout_s + 5.0
        hello = self._link.send(self._hello, (), time.monotonic())
        while self.rank < 0:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise JoinTimeoutError(
                    f"{self._link.name} did not answer {self._settings.role} {self._settings.rank} within "
                    f"{self._settings.start_timeout_s:g} s; is it running, and does this machine reach it?"
                )
            raise_if_refused(self._hub, self._link.channel, self._link.name)
            for body in self._receive(min(remaining, 0.5)):
                self._welcome(body, hello)
            self._link.probe(time.monotonic())
        self._thread.start()

    def _welcome(self, body: m.Body, hello: int) -> None:
        if isinstance(body, m.Welcome):
            self.rank, self.members = body.rank, body.members
        elif isinstance(body, m.Failed):
            raise rebuild(body, self._link.name, default=RendezvousError)

    def _receive(self, timeout_s: float) -> list[m.Body]:
        taken = [self._link.take(frames) for _, frames in self._hub.receive(timeout_s)]
        return [one[1] for one in taken if one is not None]

    @property
    def me(self) -> m.Member:
        """This process, as the scheduler knows it."""
        return next(one for one in self.members if (one.role, one.rank) == (self._settings.role, self.rank))

    def _run(self) -> None:
        next_beat = heard = time.monotonic()
        closed_since: float | None = None
        while not self._left.is_set():
            now = time.monotonic()
            if self._bye is not None:
                self._say_goodbye(self._bye)
                return
            if now >= next_beat:
                next_beat = now + self._settings.heartbeat_interval_s
                if len(self._link) < 4:
                    self._link.send(m.Heartbeat(self.round), (), now)
            news = self._receive(next_beat - now)
            now = time.monotonic()
            heard = now if news else heard
            closed_since = None if self._hub.is_open(self._link.channel) else closed_since or now
            for body in news:
                self._take_news(body)
            self._watch_scheduler(now, heard, closed_since)
            self._link.probe(now)

    def _take_news(self, body: m.Body) -> None:
        if not isinstance(body, m.News):
            return
        if body.deaths and self.failure is None:
            self.deaths = body.deaths
            self._fail(PeerDiedError("; ".join(describe(death) for death in body.deaths)))
        if not self.left.issuperset(body.left):
            self.left = self.left.union(body.left)
            self._on_news()
        if body.shutdown and not self.shutdown:
            self.shutdown = True
            self._on_news()

    def _watch_scheduler(self, now: float, heard: float, closed_since: float | None) -> None:
        if self.failure is not None or self.shutdown:
            return
        host = self._settings.scheduler.removeprefix("tcp://")
        if closed_since is not None and now - closed_since > self._settings.disconnect_grace_s:
            self._fail(
                PeerDiedError(f"scheduler 0 on {host} died: its connection closed {now - closed_since:.1f} s ago")
            )
        elif now - heard > self._settings.heartbeat_timeout_s:
            self._fail(PeerDiedError(f"scheduler 0 on {host} died: it was not heard for {now - heard:.1f} s"))

    def _fail(self, failure: PacelineError) -> None:
        self.failure = failure
        self._on_news()

    def _say_goodbye(self, reason: str) -> None:
        deadline = time.monotonic() + 2.0
        self._link.send(m.Bye(reason), (), time.monotonic())
        while len(self._link) and time.monotonic() < deadline and self._hub.is_open(self._link.channel):
            self._receive(0.1)
        self._left.set()

    def leave(self, reason: str = "") -> None:
        """Leave the job; with a reason it is a failure and ends the job for all. Idempotent."""
        if self._bye is None:
            self._bye = reason
            if self._thread.is_alive():
                self._hub.wake()
                self._thread.join(5.0)
        self._hub.close()

    def check(self) -> None:
        """Raise the failure of the job, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))
