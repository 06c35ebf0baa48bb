"""A worker's connection to the job: its membership, its requests, and collective calls of all workers.

Requests go through one :class:`~paceline.net.client.Client` with a channel to the scheduler (channel 0) and one to
each server (channel 1 + rank). The :class:`~paceline.net.lifeline.Lifeline` keeps the membership, with a hub and a
thread of its own. It wakes the client when the job fails; then every wait raises that failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.config import Settings
from paceline.errors import DeadlineError, PacelineError
from paceline.hetero.step_noise import Counted
from paceline.host import forks
from paceline.host.plain_text import described
from paceline.net.base import Frames
from paceline.net.call import Call, OnAnswer, way_of
from paceline.net.client import Client
from paceline.net.hosts import address_for
from paceline.net.lifeline import Lifeline
from paceline.net.sockets import SocketHub
from paceline.observe import meter
from paceline.observe.account import GC, WAIT, Steps
from paceline.observe.logs import set_up_worker_logging
from paceline.observe.urgency import Urgency
from paceline.wire import messages as m
from paceline.wire.limits import MAX_GATHER_BYTES
from paceline.worker import alone, notice
from paceline.worker.joining import Joining, Part
from paceline.worker.late import MISSING_TIMEOUT_S, LateRequests, whom_it_waits_for, withdrawals
from paceline.worker.round_times import RoundTimes
from paceline.worker.stores import Store, WorkerStores
from paceline.worker.to_tell import ToTell
from paceline.worker.training_kind import TrainingKind

logger = logging.getLogger(__name__)

_SCHEDULER = 0
_FIRST_SERVER = 1


class Session:
    """One worker's connection to the job. Thread-safe.

    Args:
        settings: settings of this worker.
        make_hub: function that makes a transport.

    Raises:
        AuthenticationError: the scheduler or a server does not admit this process.
        RendezvousError: the scheduler refused this process, or not all processes joined in time.
        DeadlineError: a server did not answer in time.
    """

    kind = TrainingKind()
    """How this worker trains: see :meth:`trains`."""

    def __init__(self, settings: Settings, make_hub: Callable[[], SocketHub]) -> None:
        set_up_worker_logging(settings)
        self.settings = settings
        self._pid = os.getpid()
        self._gathers: Counter[str] = Counter()
        self.stores = WorkerStores()
        self._closed = False
        self.gone: dict[int, int] = {}
        """Workers that were gone at the last gather or barrier, and their last rounds; the same on all workers."""
        self.dead: frozenset[int] = frozenset()
        """Those of them that had died, or left under notice: nobody misses what they would have said."""
        self.walkers: dict[str, object] = {}
        """This worker's sides of pools of samples, by name."""
        self.pace = RoundTimes(keep=bool(settings.profile_steps) or settings.profile == "-")
        self.meter = meter.Meter()
        self._urgency = Urgency(3)
        self.meter.on_round = self._round_ended
        meter.start(self.meter)
        self.before_wait: Callable[[], None] | None = None
        """Called before every wait."""
        self._client = Client(make_hub(), check=self._check_open)
        self._failed = threading.Event()
        self._lifeline = Lifeline(settings, make_hub(), on_change=self._on_change, add_figures=self._add_figures)
        self.notice = notice.Notice(self, self._lifeline.ask_to_leave)
        self.to_tell = ToTell(self._lifeline.beat_soon)
        self.came: list[int] = []
        """Replacements that were let in by the last gather."""
        self.joining = Joining(self, settings.incarnation > 0)
        self.joining.add("session", Part(self._standing, self._stand))
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._client.close)
            on_error.callback(self._lifeline.leave, "it could not connect")
            self._lifeline.join()
            self._connect()
            on_error.pop_all()
        alone.joined(self)
        notice.begin(self.notice)

    def _connect(self) -> None:
        scheduler, client = self.settings.scheduler, self._client
        channels = [client.connect(scheduler, "worker", "scheduler", f"at {scheduler}")]
        for server in self.servers:
            address = address_for(server, self.host_id, self.settings.unix_sockets)
            channels.append(client.connect(address, "worker", f"server {server.rank}", f"on {server.host}", bulk=True))
        claim = m.Claim("worker", self.rank, self._lifeline.me.token, self.settings.incarnation)
        self.wait([client.claim(channel, claim) for channel in channels])

    # ---- members ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._lifeline.rank

    @property
    def is_lead(self) -> bool:
        """Whether this worker does what one does for all: it places keys, sets values, and writes checkpoints."""
        return self.rank == self.lead

    @property
    def lead(self) -> int:
        """The lowest rank of those that were not gone at the last gather or barrier; -1: this worker joins them."""
        if self.joining.is_on:
            return -1
        return next(rank for rank in range(self.settings.num_workers) if rank not in self.gone)

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
        """Whether all workers and servers run on this host."""
        return all(one.host_id == self.host_id for one in (*self.workers, *self.servers))

    @property
    def host_id(self) -> str:
        """Identifier of the host: the same for all processes that can map each other's memory."""
        return self._lifeline.me.host_id

    def deaths(self) -> list[m.Death]:
        """Return the members that the job has lost, and that nobody has replaced."""
        return [*self._lifeline.lost, *self._lifeline.deaths]

    @property
    def fitting_groups(self) -> tuple[int, list[list[int]]]:
        """The generation of the groups that fit the measured speeds, and these; (0, ...) before they have changed."""
        return self._lifeline.groups

    @property
    def round(self) -> int:
        """The last round that this worker has pushed."""
        return self._lifeline.round

    @property
    def waited_s(self) -> float:
        """Seconds that this worker has spent waiting for answers: the rest of a step is its own."""
        return self.meter.waited_s

    @property
    def step_s(self) -> float:
        """Seconds that this worker computes in a step; 0: not known."""
        return self.pace.step_seconds(self.meter.open_own_s, self.meter.open_steps)

    @property
    def fastest_s(self) -> float:
        """The same of the fastest worker, as the scheduler has heard."""
        return self._lifeline.fastest_s

    def trains(self, **changes: Any) -> None:
        """Note how this worker trains: fields of :class:`~paceline.worker.training_kind.TrainingKind`."""
        self.kind = replace(self.kind, **changes)

    def note_round(self, round: int, samples: float = 1.0) -> None:
        """Report the round of a push, before it is sent, with the next heartbeat; end the account of the one before."""
        round += self.joining.round
        if round > self._lifeline.round:
            self._lifeline.round = round
            self.meter.end_round(round, samples)

    def _round_ended(self, steps: Steps) -> None:
        self.pace.add(steps)
        if self._urgency.note(self.meter.now(), steps.wall_s, steps.way_s, steps.seconds[GC]):
            self._lifeline.beat_soon()

    def _add_figures(self, beat: m.Heartbeat) -> None:
        pace = self.pace
        counted = pace.counted if self.settings.measured else Counted()  # only the choice of dist_auto needs it
        beat.work += self.meter.steps
        beat.spread = m.Spread(counted.steps, counted.spikes, counted.spike_factor, counted.jitter)
        beat.step_s, beat.usual_samples = self.step_s, pace.samples
        # It takes a millisecond, and only groups and dist_auto follow it.
        kind = self.kind
        beat.usual_s = (pace.seconds or 0.0) if kind.auto or kind.grouped_store else 0.0
        self.to_tell.add_to(beat)
        is_shared = kind.has_measured_shares or kind.hands_out
        beat.account = self.meter.report(kind.group, kind.is_ddp, is_shared, kind.is_local)

    # ---- requests --------------------------------------------------------------------------------------------------

    def ask_server(
        self, server: int, body: m.Request, what: str, frames: Frames = (), on_answer: OnAnswer | None = None
    ) -> Call:
        """Send a request to a server, and do not wait.

        Args:
            server: rank of the server.
            body: the request.
            what: name of the request for errors: ``push of 'fc1.weight', round 3``.
            frames: payload; it must not change until the answer.
            on_answer: called with the answer, in the thread that receives it; answers of one server are handled in the
                order of their arrival.
        """
        self._check_open(getattr(body, "store", ""))
        here = self.joining.answered_here(body, f"server {server}", what)
        return here or self._client.ask(_FIRST_SERVER + server, body, what, frames, on_answer)

    def ask_scheduler(self, body: m.Request, what: str) -> Call:
        """Send a request to the scheduler, and do not wait."""
        self._check_open(getattr(body, "store", ""))
        return self._client.ask(_SCHEDULER, body, what)

    @property
    def is_own(self) -> bool:
        """Whether this process has joined the job; False in children that it forks."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise in a forked child.

        Raises:
            PacelineError: always there; the text says what to do instead.
        """
        if os.getpid() != self._pid:
            raise PacelineError(forks.error_text(f"worker {self.rank}", self._pid))

    def check(self) -> None:
        """Raise where the job has failed, and in a forked child.

        Raises:
            PacelineError: the failure of the job.
        """
        self.check_process()
        self._lifeline.check()

    def _check_open(self, store: str = "") -> None:
        """Raise where no request can be sent: of this process, or on a store that is closed here."""
        self.check_process()
        if self._closed:
            late = "functions that atexit knew before the first store was made are called after that"
            raise PacelineError(f"worker {self.rank} has left the job; it can send no more requests; {late}")
        self._lifeline.check()
        if store in self.stores.closed:
            raise PacelineError(f"store {store!r} is closed on worker {self.rank}; create another one")

    def call_server(self, server: int, body: m.Request, what: str) -> m.Body:
        """Send a request to a server and wait for the answer."""
        return self._answer_of(self.ask_server(server, body, what))

    def call_scheduler(self, body: m.Request, what: str, timeout_s: float | None = None) -> m.Body:
        """Send a request to the scheduler and wait for the answer."""
        return self._answer_of(self.ask_scheduler(body, what), timeout_s)

    def _answer_of(self, call: Call, timeout_s: float | None = None) -> m.Body:
        self.wait([call], timeout_s)
        assert call.body is not None
        return call.body

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, calls: Iterable[Call], timeout_s: float | None = None) -> None:
        """Wait until calls are answered.

        Without ``timeout_s`` the time of the settings counts, from when those that a call waits for have got on last.

        Raises:
            PeerDiedError: a member of the job died; the text names it.
            DeadlineError: the answers did not arrive in time; the text names the missing processes.
            Exception: the first error that a peer answered or that ``on_answer`` raised.
        """
        if self.before_wait is not None:
            self.before_wait()
        calls, began, before = list(calls), self.meter.now(), self.meter.enter(WAIT)
        try:
            self._wait(calls, timeout_s)
        finally:
            self.meter.leave(before)
        if before != meter.NOTHING:
            self.meter.note_way(way_of(calls, began))

    def _wait(self, calls: Sequence[Call], timeout_s: float | None) -> None:
        limit_s = rest_s = self.settings.timeout_s if timeout_s is None else timeout_s
        waited_s, requests = 0.0, LateRequests(limit_s, self.rank)
        while (late := self._client.wait(calls, rest_s)) is not None:
            waited_s += rest_s
            whom, text = whom_it_waits_for(late, self._client, self._status, (self.rank, late.channel - _FIRST_SERVER))
            connections = self._client.connections(late.channel)
            rest_s = requests.rest_s((late.channel, late.seq), whom, connections) if timeout_s is None else 0.0
            if rest_s <= 0:
                advice = "; if that is normal here, raise PACELINE_TIMEOUT_S" if timeout_s is None else ""
                for server, body in withdrawals(late.request, range(len(self.servers))):
                    self.ask_server(server, body, "giving up")
                after = f"was not answered within {waited_s:.3g} s"
                raise DeadlineError(f"worker {self.rank}: {late.what} at {late.whom} {after}{text}{advice}")

    def _status(self) -> m.Body:
        return self.call_scheduler(m.AskStatus(), "asking for the status", MISSING_TIMEOUT_S)

    # ---- together ----------------------------------------------------------------------------------------------------

    def barrier(self, name: str, store: str = "", pauses: bool = False) -> bool:
        """Wait until all live workers have called this with the same name; of a store, all that have not left it.

        ``pauses``: the servers know that this worker pauses. Returns whether they know it of some of the workers, and
        of others not.
        """
        if self.joining.is_on:
            return False
        answer = self.call_scheduler(m.Enter(name, store, self.round, pauses), f"barrier {name!r}")
        if not isinstance(answer, m.Gathered):
            return False
        self.gone, self.dead = dict(answer.gone), frozenset(answer.dead)
        return answer.mixed

    def gather(
        self, name: str, payload: bytes, timeout_s: float | None = None, *, lets_in: bool = False, why_shut: str = ""
    ) -> list[bytes]:
        """Return the payloads of all workers, by rank.

        Collective: all live workers call it, in the same order per name.

        Args:
            name: purpose of the call. It need not be unique: calls with the same name are counted.
            payload: this worker's payload; those of all workers together have at most 8 MiB.
            timeout_s: longest wait for all workers, in seconds; by default as for any request.
            lets_in: all are between the same two rounds: others may be let in, :attr:`came` until :meth:`welcome`.
            why_shut: why nobody may be let in nevertheless; who waits for it gets this error.

        Returns:
            One entry for each rank; empty for a worker that left the job without an error before it called.

        Raises:
            ValueError: the payload alone is over the limit.
            RemoteError: all payloads together are over the limit; on every worker.
            PeerDiedError: a member of the job died; the text names it.
            DeadlineError: not all workers called in time; the text names the missing ones.
        """
        if len(payload) > MAX_GATHER_BYTES:
            text = f"the payload has {len(payload)} bytes; the limit of all is {MAX_GATHER_BYTES}"
            raise ValueError(f"gather {name!r}: {text}")
        self._gathers[name] += 1
        if self.joining.is_on:
            return [bytes(payload)] * self.settings.num_workers
        full = f"gather/{name}/{self._gathers[name]}"
        body = m.Gather(full, bytes(payload), self.round, lets_in, why_shut)
        gathered = self.call_scheduler(body, f"gather {name!r}", timeout_s)
        assert isinstance(gathered, m.Gathered)
        self.gone, self.dead, self.came = dict(gathered.gone), frozenset(gathered.dead), gathered.came
        self.stores.come_back(gathered.phase)
        return gathered.payloads

    def welcome(self) -> None:
        """Give those that the last gather has let in their state, if this worker is to; all its parts know of them."""
        came, self.came, is_lead = self.came, [], self.is_lead
        self.gone = {rank: last for rank, last in self.gone.items() if rank not in came}
        if came and is_lead:
            self.joining.give(came, self.stores.phase)

    @property
    def has_joiners(self) -> bool:
        """Whether processes wait to take over from workers that have died."""
        return bool(self._lifeline.joiners)

    def _standing(self) -> dict[str, Any]:
        return {"gathers": self._gathers, "gone": self.gone, "dead": sorted(self.dead)}

    def _stand(self, there: Mapping[str, Any] | None) -> None:
        """Be where the others are that have been there before."""
        self.stores.phase, self._lifeline.round = self.joining.phase, self.joining.round
        if there is not None:
            self._gathers, self.gone, self.dead = there["gathers"], there["gone"], frozenset(there["dead"])

    # ---- leaving ---------------------------------------------------------------------------------------------------

    @property
    def has_left(self) -> bool:
        """Whether this worker has left the job."""
        return self._closed

    def close_store(self, store: Store) -> None:
        """Note that this worker has left a store: its requests are refused, and its gathers are forgotten."""
        self.stores.remove(store)
        if self.kind.grouped_store == store.name:
            self.trains(grouped_store="")
        for one in [one for one in self._gathers if one.rpartition("/")[0] == store.name]:
            del self._gathers[one]

    @property
    def failure(self) -> PacelineError | None:
        """The error with which the job has failed; None while it has not failed."""
        return self._lifeline.failure

    def await_failure(self, timeout_s: float) -> PacelineError | None:
        """Wait for the news that the job has failed; returns its error, or None if it has not failed in time."""
        self._failed.wait(timeout_s)
        return self.failure

    def _on_change(self) -> None:
        if self.failure is not None:
            self._failed.set()
        self.notice.heard(self._lifeline.leave_for, self._lifeline.refusal)
        self._client.wake()

    def close(self, reason: str = "") -> None:
        """Leave the job. With a reason it is a failure, which ends the job for all members. Idempotent.

        It waits for all requests in flight. If one of them fails, leaving is a failure too: other workers would wait
        forever for a push that this worker has not finished. In a forked child it does nothing.
        """
        if self._closed or not self.is_own:
            return
        try:
            if not reason and self.failure is None:
                self.stores.finish()
        except BaseException as error:
            # Process border: the other members learn why this worker could not leave.
            reason = "" if self.failure is not None else f"it could not leave: {described(error)}"
            if not isinstance(error, PacelineError):
                raise
            logger.error("worker %d, leaving: %s", self.rank, error)
        finally:
            self._closed = True
            notice.begin(None)
            meter.stop(self.meter)
            self._client.wake()
            self.to_tell.flush()
            self._lifeline.leave(reason)
            self._client.close(linger_s=1.0)
