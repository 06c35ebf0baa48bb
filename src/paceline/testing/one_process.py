"""A job in one process and one thread: workers' stores and servers' services, and the messages between them."""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from paceline.config import Settings
from paceline.consistency import Policy
from paceline.errors import PacelineError
from paceline.kvstore.dist import DistStore
from paceline.net.base import Frames
from paceline.net.call import Call, OnAnswer
from paceline.observe.meter import Meter
from paceline.server.members import Members
from paceline.server.requests import RequestHandler
from paceline.wire import messages as m
from paceline.worker.joining import Joining
from paceline.worker.notice import Notice
from paceline.worker.session import Session
from paceline.worker.stores import WorkerStores
from paceline.worker.to_tell import ToTell


class _Session(Session):
    """A session without connections; waiting delivers messages until the answers are here."""

    def __init__(self, job: OneProcess, rank: int) -> None:
        self._job, self.settings, self._pid, self._closed = job, job.settings, os.getpid(), False
        self._lifeline: Any = SimpleNamespace(
            rank=rank, me=job.workers[rank], members=[*job.workers, *job.servers], groups=(0, []), round=0,
            failure=None, check=lambda: None,
        )  # fmt: skip
        self.stores, self.meter, self._gathers = WorkerStores(), Meter(), Counter()
        self.gone, self.dead = {}, frozenset()
        self.notice = Notice(self, lambda why: None)
        self.to_tell = ToTell(lambda: None)
        self.joining, self.came = Joining(self, is_on=False), []

    def note_round(self, round: int, samples: float = 1.0) -> None:
        """Nothing: there is no scheduler."""

    def barrier(self, name: str, store: str = "", pauses: bool = False) -> bool:
        """Deliver all there is; a test calls its workers one after the other, so others do not pause."""
        self._job.deliver_all()
        return pauses

    def gather(
        self, name: str, payload: bytes, timeout_s: float | None = None, *, lets_in: bool = False, why_shut: str = ""
    ) -> list[bytes]:
        """Return what this worker says; a test calls its workers one after the other."""
        return [payload if rank == self.rank else b"" for rank in range(len(self.workers))]

    def ask_server(
        self, server: int, body: m.Request, what: str, frames: Frames = (), on_answer: OnAnswer | None = None
    ) -> Call:
        call = Call(f"server {server}", what, body, frames, on_answer)
        call.seq = self._job.send(f"worker {self.rank}", server, body, frames, call.complete)
        return call

    def call_scheduler(self, body: m.Request, what: str, timeout_s: float | None = None) -> m.Body:
        if isinstance(body, m.Publish):
            self._job.published.setdefault(body.store, []).extend(body.blocks)
            return m.Done()
        if isinstance(body, m.Leave):
            return m.Done()
        assert isinstance(body, m.Lookup)
        wanted = set(body.keys)
        blocks = self._job.published[body.store]
        return m.Found([one for one in blocks if wanted & {key.name for key in one.keys}])

    def wait(self, calls: Iterable[Call], timeout_s: float | None = None) -> None:
        calls = list(calls)
        while not all(call.done for call in calls):
            if not self._job.deliver():
                waiting = ", ".join(call.what for call in calls if not call.done)
                raise PacelineError(f"worker {self.rank} waits for ever: {waiting}")
        for call in calls:
            call.raise_error()


class OneProcess:
    """Workers and servers of a job, without sockets or processes.

    Requests of one connection arrive in order; requests of different ones in any order, drawn by ``seed``. Workers on a
    server's host share memory with it unless ``shared_memory`` is off.

    Args:
        workers: the host of every worker, e.g. ``"aab"``.
        servers: the host of every server, e.g. ``"ab"``.
        seed: draws which message arrives next.
        **settings: fields of :class:`paceline.config.Settings`.

    Attributes:
        requests: all that was delivered to servers, as (peer, server, body).
    """

    def __init__(self, workers: str, servers: str = "a", seed: int = 0, **settings: Any) -> None:
        self.settings = Settings(num_workers=len(workers), num_servers=len(servers), **settings)
        pid = os.getpid()
        self.workers = [m.Member("worker", r, 0, "h", host, pid, "", b"w") for r, host in enumerate(workers)]
        self.servers = [m.Member("server", r, 0, "h", host, pid, "", b"s") for r, host in enumerate(servers)]
        self.published: dict[str, list[m.BlockSpec]] = {}
        self.requests: list[tuple[str, int, m.Request]] = []
        self._chance = random.Random(seed)
        self._ways: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        self._waiting: dict[tuple[str, int], Callable[[m.Body, Frames], None]] = {}
        self._seq = 0
        self.services = [self._service(rank) for rank in range(len(servers))]
        for server in range(len(servers)):
            for claim, peer in [(one, f"worker {one.rank}") for one in self.workers] + [
                (one, f"server {one.rank}") for one in self.servers
            ]:
                self._seq += 1
                self._waiting[peer, self._seq] = lambda body, frames: None
                body = m.Claim(claim.role, claim.rank, claim.token)
                self.services[server].handle(peer.encode(), self._seq, body, ())
        self.deliver_all()

    def session(self, rank: int) -> Session:
        """Return a worker's session."""
        return _Session(self, rank)

    def stores(self, policy: Policy = Policy(), mean: bool = False, **options: Any) -> list[DistStore]:  # noqa: B008
        """Return the store of every worker, rank 0 first: what all of them call, they call in this order."""
        names = {"all": "dist_sync", "each": "dist_async", "groups": "dist_gsync", "first": "dist_ksync"}
        name = names[policy.merge]
        return [DistStore(name, self.session(one.rank), policy, "s", mean, **options) for one in self.workers]

    # ---- messages --------------------------------------------------------------------------------------------------

    def _service(self, rank: int) -> RequestHandler:
        def answer(peer: bytes, seq: int, body: m.Reply, frames: Callable[[], Frames], urgency: int | None) -> None:
            copies = [bytearray(memoryview(cast(Any, frame))) for frame in frames()]
            use = partial(self._answered, peer.decode(), seq, body, copies)
            self._send(f"server {rank}", peer.decode(), use)

        def ask(owner: int, body: m.Request, frames: Frames, on_answer: OnAnswer) -> None:
            self.send(f"server {rank}", owner, body, frames, on_answer)

        members = Members([*self.workers, *self.servers], self.servers[rank].host_id, rank)
        return RequestHandler(self.settings, answer, ask, members)

    def send(self, peer: str, server: int, body: m.Request, frames: Frames, on_answer: OnAnswer) -> int:
        """Send a request of a member, e.g. of ``"worker 0"``; returns its number."""
        self._seq += 1
        self._waiting[peer, self._seq] = on_answer
        deliver = partial(self._arrive, peer, self._seq, server, body, frames)
        self._send(peer, f"server {server}", deliver)
        return self._seq

    def _arrive(self, peer: str, seq: int, server: int, body: m.Request, frames: Frames) -> None:
        self.requests.append((peer, server, body))
        # Read as late as a transport without copies may.
        copies = [bytearray(memoryview(cast(Any, frame))) for frame in frames]
        self.services[server].handle(peer.encode(), seq, body, copies)

    def _answered(self, peer: str, seq: int, body: m.Reply, frames: Sequence[bytearray]) -> None:
        self._waiting.pop((peer, seq))(body, frames)

    def _send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        self._ways.setdefault((source, target), deque()).append(deliver)

    def deliver(self) -> bool:
        """Deliver one message of any connection; False when there is none."""
        busy = [way for way in sorted(self._ways) if self._ways[way]]
        if busy:
            self._ways[self._chance.choice(busy)].popleft()()
        return bool(busy)

    def deliver_all(self) -> None:
        """Deliver until no message is under way."""
        while self.deliver():
            pass
