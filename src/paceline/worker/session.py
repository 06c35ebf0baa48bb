"""A worker's part in the job: its connections, its requests, and waiting for answers with a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from paceline.config import Settings, from_environment
from paceline.consistency import Policy
from paceline.errors import ConfigError, DeadlineError, PacelineError
from paceline.local_merge import LocalMerge
from paceline.peer.connection import Connection
from paceline.peer.errors_by_name import rebuild
from paceline.peer.hosts import address_for
from paceline.peer.lifeline import Lifeline, identity, raise_if_refused
from paceline.transport import Hub, Security
from paceline.transport.base import Frames
from paceline.transport.zeromq import ZmqHub
from paceline.wire import messages as m
from paceline.wire.limits import MAX_GATHER_BYTES
from paceline.worker.leaving import Exit

logger = logging.getLogger(__name__)

#: Waiting looks at deadlines, refusals and overdue answers this often; answers and news wake it at once.
LOOK_S = 0.5

OnAnswer = Callable[[m.Body, Frames], None]


class Ticket:
    """A request that was sent.

    Attributes:
        done: the answer is here and was used.
        error: the answer was an error, raised by :meth:`Session.wait`.
    """

    __slots__ = ("_on_answer", "body", "done", "error", "link", "seq", "what")

    def __init__(self, link: Connection, what: str, on_answer: OnAnswer | None) -> None:
        self.link, self.what = link, what
        self.seq = 0
        self.done = False
        self.error: Exception | None = None
        self.body: m.Body | None = None
        self._on_answer = on_answer

    def complete(self, body: m.Body, frames: Frames) -> None:
        """Use the answer."""
        if isinstance(body, m.Failed):
            self.error = rebuild(body, self.link.name)
        else:
            self.body = body
            self._use(body, frames)
        self.done = True

    def _use(self, body: m.Body, frames: Frames) -> None:
        if self._on_answer is None:
            return
        try:
            self._on_answer(body, frames)
        except PacelineError as error:
            self.error = type(error)(f"{self.what} at {self.link.name}: {error}")


class Session:
    """The job, as one worker sees it.

    Args:
        settings: of this worker.
        make_hub: makes a transport.
    """

    def __init__(self, settings: Settings, make_hub: Callable[[], Hub]) -> None:
        self.settings = settings
        self._lock = threading.RLock()
        self._hub = make_hub()
        self._lifeline = Lifeline(settings, make_hub(), on_news=self._hub.wake)
        self._tickets: dict[tuple[int, int], Ticket] = {}
        self._closers: list[Callable[[], None]] = []
        self._gathers: Counter[str] = Counter()
        self._closed = False
        try:
            self._lifeline.join()
            self._links = [self._open(settings.scheduler, f"scheduler at {settings.scheduler}", False)]
            for server in self.servers:
                address = address_for(server, self.host_id, settings.unix_sockets)
                self._links.append(self._open(address, f"server {server.rank} on {server.host}", True))
            self.wait([self._claim(link) for link in self._links], settings.start_timeout_s)
        except BaseException:
            self._lifeline.leave("it could not connect")
            self._hub.close()
            raise

    def _open(self, address: str, name: str, bulk: bool) -> Connection:
        channel = self._hub.connect(address, identity("worker"), bulk=bulk)
        return Connection(self._hub, channel, name)

    def _claim(self, link: Connection) -> Ticket:
        return self._submit(link, m.Claim("worker", self.rank, self._lifeline.me.token), (), "joining", None)

    # ---- who is there ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._lifeline.rank

    @property
    def workers(self) -> list[m.Member]:
        """All workers, in rank order."""
        return [one for one in self._lifeline.members if one.role == "worker"]

    @property
    def servers(self) -> list[m.Member]:
        """All servers, in rank order."""
        return [one for one in self._lifeline.members if one.role == "server"]

    @property
    def is_on_one_host(self) -> bool:
        """Whether all workers and servers live on this host."""
        return all(one.host_id == self.host_id for one in (*self.workers, *self.servers))

    @property
    def host_id(self) -> str:
        """What this process shares with processes that can map its memory."""
        return self._lifeline.me.host_id

    @property
    def pid(self) -> int:
        """This process."""
        return self._lifeline.me.pid

    def relays(self, policy: Policy) -> LocalMerge:
        """Return where local merge takes place for stores of a policy."""
        workers, servers = ([one.host_id for one in members] for members in (self.workers, self.servers))
        alone = range(len(workers))
        return LocalMerge(workers, servers, policy.unit_of(len(workers)) if self.settings.local_merge else alone)

    def deaths(self) -> list[m.Death]:
        """Return the members that the job has lost."""
        return list(self._lifeline.deaths)

    def note_round(self, round: int) -> None:
        """Report progress with the next heartbeat."""
        self._lifeline.round = max(self._lifeline.round, round)

    # ---- requests --------------------------------------------------------------------------------------------------

    def ask_server(
        self, server: int, body: m.Request, what: str, frames: Frames = (), on_answer: OnAnswer | None = None
    ) -> Ticket:
        """Send a request to a server; ``frames`` stay unchanged until the answer.

        Args:
            server: its rank.
            body: the request.
            what: for messages: ``push of 'fc1.weight', round 3``.
            frames: payload.
            on_answer: called with the answer, in whichever thread waits for it.
        """
        return self._submit(self._links[1 + server], body, frames, what, on_answer)

    def ask_scheduler(self, body: m.Request, what: str) -> Ticket:
        """Send a request to the scheduler."""
        return self._submit(self._links[0], body, (), what, None)

    def _submit(
        self, link: Connection, body: m.Request, frames: Frames, what: str, on_answer: OnAnswer | None
    ) -> Ticket:
        ticket = Ticket(link, what, on_answer)
        with self._lock:
            self._check_open()
            ticket.seq = link.send(body, frames, time.monotonic())
            self._tickets[link.channel, ticket.seq] = ticket
        return ticket

    def _check_open(self) -> None:
        if self._closed:
            raise PacelineError(f"worker {self.rank} has left the job; nothing can be asked any more")
        self._lifeline.check()

    def call_server(self, server: int, body: m.Request, what: str, frames: Frames = ()) -> m.Body:
        """Ask a server and wait for the answer."""
        return self._answer_of(self.ask_server(server, body, what, frames))

    def call_scheduler(self, body: m.Request, what: str, timeout_s: float | None = None) -> m.Body:
        """Ask the scheduler and wait for the answer."""
        return self._answer_of(self.ask_scheduler(body, what), timeout_s)

    def _answer_of(self, ticket: Ticket, timeout_s: float | None = None) -> m.Body:
        self.wait([ticket], timeout_s)
        assert ticket.body is not None
        return ticket.body

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, tickets: Iterable[Ticket], timeout_s: float | None = None) -> None:
        """Wait until all these requests are answered.

        Raises:
            PeerDiedError: a member of the job died; the text names it.
            DeadlineError: the answers did not come in time; the text names who is missing.
            Exception: what a peer answered; of several, the first.
        """
        tickets = list(tickets)
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not all(ticket.done for ticket in tickets):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._too_late(next(ticket for ticket in tickets if not ticket.done), timeout_s)
            with self._lock:
                if all(ticket.done for ticket in tickets):
                    break
                self._check_open()
                self._receive(min(remaining, LOOK_S))
        for ticket in tickets:
            if ticket.error is not None:
                error, ticket.error = ticket.error, None
                raise error

    def _receive(self, timeout_s: float) -> None:
        arrived = self._hub.receive(timeout_s)
        for channel, frames in arrived:
            taken = self._links[channel].take(frames)
            if taken is not None:
                seq, body, payload = taken
                ticket = self._tickets.pop((channel, seq), None)
                if ticket is not None:
                    ticket.complete(body, payload)
        if not arrived:
            self._look_around()

    def _look_around(self) -> None:
        now = time.monotonic()
        for channel in self._hub.reopened():
            self._links[channel].probe(now, at_once=True)
        for link in self._links:
            if len(link):
                raise_if_refused(self._hub, link.channel, link.name)
                link.probe(now)

    def poll(self) -> None:
        """Use the answers that are here already, without waiting."""
        with self._lock:
            self._check_open()
            self._receive(0.0)

    def _too_late(self, ticket: Ticket, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"worker {self.rank}: {ticket.what} at {ticket.link.name} was not answered within {timeout_s:g} s"
            f"{self._whom_it_waits_for(ticket)}; if that is normal here, raise PACELINE_TIMEOUT_S"
        )

    def _whom_it_waits_for(self, ticket: Ticket) -> str:
        """Ask who holds a push, a barrier or a gather up; returns text for the error."""
        sent = ticket.link.sent(ticket.seq)
        questions: list[m.Request] = []
        if sent is not None and isinstance(sent.body, m.Push):
            questions = [m.AskMissing(sent.body.store, sent.body.entries[0])]
        elif sent is not None and isinstance(sent.body, m.AskNorm):
            questions = [m.AskMissing(sent.body.store, entry) for entry in sent.body.entries]
        elif sent is not None and isinstance(sent.body, m.Enter | m.Gather):
            questions = [m.AskAbsent(sent.body.barrier)]
        else:
            return ""
        try:
            asked = [self._submit(ticket.link, one, (), "asking who is missing", None) for one in questions]
            status = self.ask_scheduler(m.AskStatus(), "asking for the status")
            self.wait([*asked, status], 5.0)
        except PacelineError as error:
            return f" ({error})"
        assert isinstance(status.body, m.Status)
        missing = {rank for one in asked if isinstance(one.body, m.Missing) for rank in one.body.workers}
        return "; it waits for " + (", ".join(_workers_of(status.body, sorted(missing))) or "nobody")

    # ---- together ----------------------------------------------------------------------------------------------------

    def barrier(self, name: str) -> None:
        """Wait until all live workers have come here."""
        self.call_scheduler(m.Enter(name), f"barrier {name!r}")

    def gather(self, name: str, payload: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Return what every worker says, by rank. Collective: all live workers call it, in the same order per name.

        Args:
            name: says what it is about; calls with the same name are counted, so it need not be unique.
            payload: what this worker says; of all workers together at most 8 MiB.
            timeout_s: for all to come; by default as for any request.

        Returns:
            One entry for each rank; empty for a worker that had left the job in peace before it came here.

        Raises:
            ValueError: the payload alone is over the limit.
            RemoteError: all payloads together are over the limit; on every worker.
            PeerDiedError: a member of the job died; the text names it.
            DeadlineError: not all came in time; the text names who is missing.
        """
        if len(payload) > MAX_GATHER_BYTES:
            raise ValueError(
                f"gather {name!r}: a payload of {len(payload)} bytes; all together have {MAX_GATHER_BYTES}"
            )
        self._gathers[name] += 1
        full = f"gather/{name}/{self._gathers[name]}"
        gathered = self.call_scheduler(m.Gather(full, bytes(payload)), f"gather {name!r}", timeout_s)
        assert isinstance(gathered, m.Gathered)
        return gathered.payloads

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def on_close(self, closer: Callable[[], None]) -> None:
        """Have something done before the connections close."""
        self._closers.append(closer)

    @property
    def failure(self) -> PacelineError | None:
        """Why the job has failed; None while it has not."""
        return self._lifeline.failure

    def close(self, reason: str = "") -> None:
        """Leave the job; with a reason it is a failure and ends the job for all. Idempotent.

        Everything under way is waited for. If that fails, leaving is a failure as well: the others would wait for ever
        for what this worker has not finished.
        """
        if self._closed:
            return
        try:
            if not reason and self.failure is None:
                for closer in self._closers:
                    closer()
        except BaseException as error:
            reason = "" if self.failure is not None else f"it could not leave: {type(error).__name__}: {error}"
            if not isinstance(error, PacelineError):
                raise
            logger.error("worker %d, leaving: %s", self.rank, error)
        finally:
            with self._lock:
                self._closed = True
                self._lifeline.leave(reason)
                self._hub.close(linger_s=1.0)


def _workers_of(status: m.Status, ranks: Sequence[int]) -> list[str]:
    found = []
    for member, round, silent_s in zip(status.members, status.rounds, status.silent_s, strict=True):
        if member.role == "worker" and member.rank in ranks:
            where = f"worker {member.rank} on {member.host} (pid {member.pid})"
            found.append(f"{where}, which is at round {round} and was heard {silent_s:.1f} s ago")
    return found


_current: Session | None = None
_current_lock = threading.Lock()
_exit = Exit()


def current_session() -> Session:
    """Return this process's session, joining the job at the first call.

    Raises:
        ConfigError: this process was not started as a worker of a job.
    """
    global _current
    with _current_lock:
        if _current is None or _current._closed:
            settings = from_environment()
            if not settings.scheduler or settings.role != "worker":
                raise ConfigError(
                    "a distributed store needs a job: start the script with `paceline launch -n 2 -- python script.py` "
                    "or set PACELINE_SCHEDULER, PACELINE_JOB_KEY and the other PACELINE_* variables"
                )
            security = Security.of(settings)
            _exit.install()
            _current = _exit.session = Session(settings, lambda: ZmqHub(security))
        return _current
