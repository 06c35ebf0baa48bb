"""The server process: one loop that carries out requests and takes the answers of other servers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import psutil
import torch

from paceline.config import Settings
from paceline.consistency import check_every_rule
from paceline.errors import ConfigError, PacelineError, PeerDiedError
from paceline.extensions import load_all
from paceline.host.cores import share_of, usable_cores
from paceline.host.descriptors import raise_limit_for
from paceline.host.exitcodes import PEER_FAILED
from paceline.host.plain_text import described
from paceline.net import Security
from paceline.net.allocator import give_back_freed_memory
from paceline.net.answerer import Answerer
from paceline.net.base import Frames
from paceline.net.call import OnAnswer
from paceline.net.claims import Bounds
from paceline.net.client import Client
from paceline.net.hosts import address_for, server_addresses
from paceline.net.lifeline import Lifeline
from paceline.net.sockets import SocketHub, SocketListener
from paceline.observe import meter, ring
from paceline.observe.account import RECEIVE, REST, SERVER_GC, SERVER_PARTS, Steps
from paceline.observe.logs import set_up_logging
from paceline.observe.urgency import Urgency
from paceline.server.members import Members
from paceline.server.requests import RequestHandler
from paceline.wire import messages as m

#: Peer, number, request and frames.
Asked: TypeAlias = tuple[bytes, int, m.Request, Frames]

logger = logging.getLogger(__name__)


#: Check interval of the loop for overdue answers. Messages and changes of the job wake it at once.
IDLE_S = 1.0

#: The same while a notice waits until the values that its worker was sent have left.
_LOOK_S = 0.002

#: Others go on without a worker after these, and change the values that it is sent.
_NOTICES = (m.Pause, m.Away, m.OnBehalf)

#: Part of this host's memory that one member's requests that wait, and its answers, may take. Of an operation on
#: tensors that fits the memory, one member brings or gets half at most.
_MEMBERS_PART = 0.5

#: Elements of a measurement of speed: more than caches hold, and a few milliseconds to sum. And trials.
_ELEMENTS, _TRIALS = 1 << 22, 5


class OwnerClient:
    """Asks the owners of buckets by their rank, and connects to each when it is first asked. Used by one thread.

    No request has a deadline: the workers behind it have theirs, and ask who is missing when it has passed. The
    scheduler tells everybody of the death of a server.

    Attributes:
        channels: the connections, by rank.
    """

    def __init__(self, hub: SocketHub, me: m.Member, servers: Sequence[m.Member]) -> None:
        self._me, self._servers = me, servers
        self._client = Client(hub)
        self.channels: dict[int, int] = {}

    def ask(self, server: int, body: m.Request, frames: Frames, on_answer: OnAnswer) -> None:
        """Send a request; those to one server arrive in order. Frames stay unchanged until the answer."""
        if server not in self.channels:
            self.channels[server] = self._connect(self._servers[server])
        what = type(body).__name__
        self._client.ask(self.channels[server], body, what, frames, on_answer, lambda failure: on_answer(failure, ()))

    def _connect(self, server: m.Member) -> int:
        address = address_for(server, self._me.host_id, False)
        channel = self._client.connect(address, "server", f"server {server.rank}", f"on {server.host}", bulk=True)
        self._client.claim(channel, m.Claim("server", self._me.rank, self._me.token))
        return channel

    def poll(self) -> None:
        """Use the answers that have arrived, without waiting."""
        self._client.poll()


class Server:
    """Runs a :class:`~paceline.server.requests.RequestHandler` over a listener."""

    def __init__(self, settings: Settings, listener: SocketListener, lifeline: Lifeline, hub: SocketHub) -> None:
        self._listener, self._lifeline = listener, lifeline
        listener.watch_hub(hub)
        self._owners = OwnerClient(hub, lifeline.me, [one for one in lifeline.members if one.role == "server"])
        members = Members(lifeline.members, lifeline.me.host_id, lifeline.rank)
        most = psutil.virtual_memory().total * _MEMBERS_PART
        self._answerer = Answerer(listener, members.knows, most_bytes=most)
        self._requests = RequestHandler(settings, self._answerer.answer, self._owners.ask, members)
        self._has_new_keys = False
        self._held: list[Asked] = []
        """Notices whose worker is still being sent values, and its later requests."""

    def _taken(self, arrived: Iterable[tuple[bytes, Frames]]) -> Iterator[Asked]:
        for peer, frames in arrived:
            request = self._answerer.take(peer, frames)
            if request is not None:
                yield peer, *request

    def _must_wait(self, peer: bytes, body: m.Request) -> bool:
        """Return whether a request is a notice that comes too early, or comes after one."""
        if isinstance(body, _NOTICES) and self._listener.is_sending(peer):
            return True
        return any(asked[0] == peer for asked in self._held)

    def run(self) -> int:
        """Serve until all workers have left or the job has failed; returns the exit code."""
        next_s = IDLE_S
        while True:
            before = meter.active.enter(RECEIVE)
            arrived = self._listener.receive(min(_LOOK_S if self._held else IDLE_S, next_s))
            meter.active.leave(before)
            held, self._held = self._held, []
            for peer, seq, body, frames in first_layers_first(chain(held, self._taken(arrived))):
                if (self._held or isinstance(body, _NOTICES)) and self._must_wait(peer, body):
                    self._held.append((peer, seq, body, frames))
                    continue
                self._has_new_keys |= isinstance(body, m.Init)
                self._requests.handle(peer, seq, body, frames)
            next_s = max(0.0, self._requests.end_graces(meter.active.now()))
            if self._owners.channels:
                self._owners.poll()
            meter.active.end_turn()
            if self._lifeline.came:
                known = self._requests.take_in(self._lifeline.came, self._lifeline.rejoined)
                self._lifeline.note_taken_in(known)
            if self._lifeline.left:
                self._requests.take_out(self._lifeline.left)
            if self._lifeline.lost:
                self._bury()
            if self._has_new_keys:
                self._has_new_keys = False
                give_back_freed_memory()
            if self._lifeline.failure is not None:
                logger.error("%s", self._lifeline.failure)
                return PEER_FAILED
            if self._lifeline.shutdown:
                return 0

    def _bury(self) -> None:
        """Go on without the workers that have died, and tell the scheduler when nothing here waits for them."""
        for death in self._lifeline.lost:
            if not self._lifeline.is_noted(death.rank) and self._requests.is_newest(death):
                round = self._requests.bury(death.rank)
                if round is not None:
                    self._lifeline.note_taken_out(death.rank, round)


def first_layers_first(requests: Iterable[Asked]) -> Iterator[Asked]:
    """Put pushes that arrived together in the order of the model. No other request overtakes or is overtaken.

    The next forward pass needs the first layers first, and backward makes them last. Any request but a push is taken
    from ``requests`` only after those before it have been carried out: it may change who is a member.
    """
    pushes: list[Asked] = []
    for request in requests:
        body = request[2]
        if isinstance(body, m.Push | m.PushSum) and body.entries:
            pushes.append(request)
            continue
        yield from sorted(pushes, key=_first_bucket)
        pushes = []
        yield request
    yield from sorted(pushes, key=_first_bucket)


def _first_bucket(asked: Asked) -> int:
    push = asked[2]
    assert isinstance(push, m.Push | m.PushSum)
    return push.entries[0].bucket


def _measured_speed() -> float:
    """Return how many elements a second one thread of this host sums and applies: the best of a few trials."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        value, total, gradient = (torch.zeros(_ELEMENTS, dtype=torch.float32, device="cpu") for _ in range(3))
        return _ELEMENTS / min(_seconds(value, total, gradient) for _ in range(_TRIALS))
    finally:
        torch.set_num_threads(threads)


def _seconds(value: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor) -> float:
    begun = time.perf_counter()
    total.add_(gradient)
    value.add_(total, alpha=-0.1)
    return time.perf_counter() - begun


def _beats_soon(lifeline: Lifeline, account: meter.Meter) -> Callable[[Steps], None]:
    """Return what lets a heartbeat tell at once of windows whose updates take far longer than usual, or come later."""
    urgency, late_s = Urgency(2), 0.0

    def told(window: Steps) -> None:
        nonlocal late_s
        updates, waited_s, late_s = max(1.0, window.samples), account.late_s - late_s, account.late_s
        busy_s = window.wall_s - window.seconds[RECEIVE]
        if urgency.note(time.monotonic(), busy_s / updates, waited_s / updates):
            lifeline.beat_soon()

    return told


def _load_optimizers() -> None:
    """Import torch's compiler, as the first optimizer of ``torch.optim`` does; it takes seconds.

    Where it cannot be imported, because no folder can be written, the worker that asks for an optimizer is told.
    """
    with contextlib.suppress(OSError):
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], lr=0.1)


def _load_extensions(settings: Settings) -> None:
    """Import the modules that the setting ``allow`` lists.

    Raises:
        ConfigError: a module cannot be imported on this host.
    """
    try:
        load_all(settings.allow)
    except ValueError as error:
        raise ConfigError(f"the setting allow cannot be followed: {error}") from error


def main(settings: Settings) -> int:
    """Run one server of a job; returns the exit code."""
    set_up_logging(settings)
    if settings.check_rules:
        check_every_rule()
    security = Security.of(settings)
    try:
        name = f"server {settings.rank}" if settings.rank >= 0 else None
        members = settings.num_workers + settings.num_servers
        raise_limit_for(members, f"a server of {settings.num_workers} workers")
        bounds = Bounds.of_job(members)
        listener = SocketListener(server_addresses(settings), security, name, bulk=True, bounds=bounds)
    except (PacelineError, OSError) as error:
        logger.error("server %d cannot start: %s", settings.rank, error)
        return 1
    speed = _measured_speed() if settings.measures_servers else 0.0
    ring.start(settings)
    account = meter.Meter(SERVER_PARTS, REST, SERVER_GC)

    def add_figures(beat: m.Heartbeat) -> None:
        beat.account = account.report()

    lifeline = Lifeline(settings, SocketHub(security), " ".join(listener.addresses), listener.wake, add_figures, speed)
    account.on_round = _beats_soon(lifeline, account)
    # While it waits for the others, and not while they wait for an answer.
    loading = threading.Thread(target=_load_optimizers, name="paceline-load", daemon=True)
    loading.start()
    try:
        lifeline.join()
        if name is None:
            listener.serve_as(f"server {lifeline.rank}")
        loading.join()
        _load_extensions(settings)
        neighbours = sum(one.host_id == lifeline.me.host_id for one in lifeline.members)
        torch.set_num_threads(settings.server_threads or share_of(usable_cores(), neighbours))
        logger.info("server %d serves at %s, pid %d", lifeline.rank, listener.addresses[0], os.getpid())
        hub = SocketHub(security)
        meter.start(account)
        try:
            code = Server(settings, listener, lifeline, hub).run()
        finally:
            meter.stop(account)
            hub.close(linger_s=1.0)
        lifeline.leave()
    except PacelineError as error:
        logger.error("server %d: %s", settings.rank, error)
        is_victim = isinstance(error, PeerDiedError)
        lifeline.leave("" if is_victim else str(error))
        code = PEER_FAILED if is_victim else 1
    except BaseException as error:
        # Process border: the other members learn why this server ends.
        lifeline.leave(f"it raised {described(error)}")
        raise
    finally:
        listener.close(linger_s=1.0)
    return code
