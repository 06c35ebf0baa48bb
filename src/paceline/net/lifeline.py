"""A member's connection to the scheduler: joining, heartbeats, and news of deaths, on a thread of its own.

| state | event | next state |
|---|---|---|
| joining | the scheduler welcomes it: all members are there | member: the thread runs |
| joining | news: the scheduler waits for others | joining: the deadline moves |
| joining | the scheduler refuses it, or is not heard in time | :meth:`Lifeline.join` raises |
| member | news of a death | failed: :attr:`Lifeline.failure` is set, heartbeats go on |
| member | news of a worker that the others go on without | member: it is in :attr:`Lifeline.lost` |
| member | something proves that the scheduler died, or it is silent for too long | failed: the scheduler died |
| member | news that all workers have left | over: :attr:`Lifeline.shutdown` is set, heartbeats go on |
| member, failed, over | :meth:`Lifeline.leave` | left: the thread has said :class:`~paceline.wire.messages.Bye` |

``failure`` and ``shutdown`` are set once and never change. The scheduler answers every heartbeat with its news, so news
that were lost come with the next answer. The scheduler's side is :mod:`paceline.membership`.

What proves a death, and which silence is one, is decided by :mod:`paceline.membership.liveness`, for the scheduler as
for members. That its process is gone the kernel of its host tells, which refuses connections to its port, or /proc on
the same host. A closed connection alone proves nothing: a listener is there or not. The time in which this thread
itself did not run, because another one held Python's lock or the process was stopped, is not silence of the scheduler.

| time | must exceed |
|---|---|
| ``heartbeat_timeout_s`` | several ``beat_interval_s`` |
| ``stall_timeout_s`` | ``heartbeat_timeout_s``; the outages that a job survives; a starved scheduler's pauses |
| ``start_timeout_s`` and 5 s | the scheduler's ``start_timeout_s``: it knows who is missing |
| ``timeout_s`` of requests | ``stall_timeout_s``: a death is reported as a death, not as a deadline |

What breaks the guarantees: a thread that holds Python's lock for ``stall_timeout_s`` of the scheduler makes this member
dead there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

import psutil

from paceline.config import Settings
from paceline.errors import JoinTimeoutError, PacelineError, PeerDiedError
from paceline.host.own_time import OwnTime
from paceline.host.plain_text import plain_lines
from paceline.membership import GONE, Action, Liveness, MemberRecord, Warn, describe, describe_all
from paceline.net.base import Frames
from paceline.net.client import Client
from paceline.net.hosts import host_id, own_address, process_state
from paceline.net.records import traffic
from paceline.net.sockets import SocketHub
from paceline.observe import events, reports, ring
from paceline.observe.clocks import RoundTrips
from paceline.observe.recording import Recording
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Check interval for the scheduler's life.
_CHECK_INTERVAL_S = 0.2

#: How much longer a member waits for the welcome than the scheduler does for all members.
_JOIN_GRACE_S = 5.0

#: Heartbeats without an answer, from which on no further ones are sent: probes go on.
_MAX_HEARTBEATS = 4

#: How long :meth:`Lifeline.leave` waits for the answer to its goodbye: on a busy machine, and after the job has failed.
BYE_TIMEOUT_S, _FAILED_BYE_TIMEOUT_S = 30.0, 2.0
_BYE_CHECK_INTERVAL_S = 0.1

#: How long :meth:`Lifeline.leave` waits for the thread; longer than the goodbye may take.
_LEAVE_TIMEOUT_S = BYE_TIMEOUT_S + 5.0


def _memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


class Lifeline:
    """Joins the job and stays in it.

    Args:
        settings: settings of this process.
        hub: a transport of its own.
        address: address of this process's listener, if it is a server.
        on_change: called on the lifeline's thread when :attr:`failure`, :attr:`shutdown`, :attr:`leave_for` or
            :attr:`refusal` has changed.
        add_figures: adds to a heartbeat what this process knows of its steps; called on the lifeline's thread.
        speed: elements that this process sums and applies in a second, if it is a server; 0: not measured.

    Attributes:
        round: reported with every heartbeat.
        failure: why the job has failed; None while it has not.
        shutdown: all workers have left.
        deaths: the members whose death ended the job.
        lost: the workers that have died, and that the job goes on without.
        fastest_s: seconds of a step of the fastest worker, as the scheduler has heard; 0: not known.
        rank: rank of this process; -1 before it has joined.
        members: members of the job; empty before this process has joined.
    """

    def __init__(
        self,
        settings: Settings,
        hub: SocketHub,
        address: str = "",
        on_change: Callable[[], None] = lambda: None,
        add_figures: Callable[[m.Heartbeat], None] = lambda beat: None,
        speed: float = 0.0,
    ) -> None:
        self._settings, self._hub, self._on_change, self._add_figures = settings, hub, on_change, add_figures
        self._hello = m.Hello(
            settings.job_id, settings.role, settings.rank, settings.local_rank, own_address(settings), host_id(),
            os.getpid(), address, settings.num_workers, settings.num_servers, speed, settings.incarnation,
        )  # fmt: skip
        self._name = f"scheduler at {settings.scheduler}"
        self._client = Client(hub, on_news=self._take_news)
        self._channel = self._client.connect(settings.scheduler, settings.role, "scheduler", f"at {settings.scheduler}")
        self._thread = threading.Thread(target=self._run, name="paceline-lifeline", daemon=True)
        self._bye: str | None = None
        now = time.monotonic()
        self._liveness = Liveness(settings, now)
        self._scheduler = self._seat_of_scheduler(now)
        self._join_until = 0.0
        self._suspects: list[m.SilentMember] = []
        """Members of this host of which the scheduler wants to know more."""
        self.round = 0
        self.fastest_s = 0.0
        self.failure: PacelineError | None = None
        self.shutdown = False
        self.deaths: list[m.Death] = []
        self.lost: list[m.Death] = []
        self._taken_out: dict[int, int] = {}
        self._is_beat_due = self._has_failed = False
        self._wish = ""
        """Why this worker wants to leave, as long as the scheduler was not asked."""
        self.leave_for = ""
        """Why this worker is to leave after its step, while the others go on; empty: it is not."""
        self.refusal = ""
        """Why it may not, though it has asked."""
        self._clock, self._recording = RoundTrips(), Recording()
        self._number = 0
        """The newest generation that this member has heard of."""
        self.joiners: list[int] = []
        """Replacements that wait to be let in."""
        self.came: list[m.Member] = []
        """On a server: members that are not the first of their rank."""
        self.rejoined: list[m.Rejoined] = []
        """On a server: those of them that count."""
        self._taken_in: list[m.TakenIn] = []
        self.left: frozenset[int] = frozenset()
        """Ranks of the workers that have left."""
        self.groups: tuple[int, list[list[int]]] = (0, [])
        """The generation of the groups that fit the measured speeds, and these."""
        self.rank = -1
        self.members: list[m.Member] = []

    # ---- joining ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the job, wait until all members are there, and start to send heartbeats.

        Raises:
            AuthenticationError: the scheduler does not admit this process.
            RendezvousError: refused, or not everybody came in time.
        """
        hello = self._client.ask(self._channel, self._hello, "joining", on_answer=self._welcomed)
        now = time.monotonic()
        own_time = OwnTime(now)
        self._wait_longer(now)
        while self._client.wait([hello], _CHECK_INTERVAL_S) is not None:
            now = time.monotonic()
            self._join_until += own_time.lost_s(now)
            if now > self._join_until:
                raise JoinTimeoutError(
                    f"{self._name} did not answer {self._settings.role} {self._settings.rank} within "
                    f"{self._settings.start_timeout_s:g} s; is it running, and does this machine reach it?"
                )
        self._thread.start()

    def _wait_longer(self, now: float) -> None:
        """Wait as long for the scheduler's answer from now on as it usually takes."""
        self._join_until = now + self._settings.start_timeout_s + _JOIN_GRACE_S

    def _welcomed(self, body: m.Body, frames: Frames) -> None:
        assert isinstance(body, m.Welcome)
        self.rank, self.members = body.rank, body.members
        self._clock = RoundTrips(body.scheduler_host_id == self._hello.host_id)
        if ring.active is not None:
            ring.active.name(self._settings.role, body.rank)
        self._note(events.JOINED)
        self._scheduler = self._seat_of_scheduler(time.monotonic(), body.scheduler_host_id, body.scheduler_pid)

    def _note(self, kind: int, value: int = 0) -> None:
        ring.note(kind, 0, events.member(self._settings.role, self.rank), value)

    def _seat_of_scheduler(self, now: float, its_host_id: str = "", pid: int = 0) -> MemberRecord:
        where = self._settings.scheduler.removeprefix("tcp://")
        return MemberRecord(m.Member("scheduler", 0, 0, where, its_host_id, pid, "", b""), b"", now, 0)

    @property
    def me(self) -> m.Member:
        """This process, as the scheduler knows it."""
        return next(one for one in self.members if (one.role, one.rank) == (self._settings.role, self.rank))

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = time.monotonic()
        self._liveness.note_heard(self._scheduler, next_beat)
        while self._bye is None:
            now = time.monotonic()
            if now >= next_beat or self._is_beat_due:
                self._is_beat_due = False
                if now >= next_beat:
                    next_beat = self._clock.next_turn(now, self._settings.beat_interval_s, self.rank)
                self._send_heartbeat()
            if self._wish:
                self._ask_to_leave()
            self._client.poll(min(next_beat - now, _CHECK_INTERVAL_S))
            self._watch_scheduler(time.monotonic())
        if self._is_beat_due or (self._settings.role == "worker" and not reports.own().is_empty):
            self._send_heartbeat()
        self._say_goodbye(self._bye)

    def _send_heartbeat(self) -> None:
        if len(self._client) >= _MAX_HEARTBEATS:
            return
        try:
            self._beat(self._figures())
        except Exception:
            # Thread border: without heartbeats this process would count as stalled, whatever figure cannot be had.
            if not self._has_failed:
                self._has_failed = True
                logger.exception("%s %d: a heartbeat goes without figures", self._settings.role, self.rank)
            self._beat(m.Heartbeat(self.round, taken_out=list(self._taken_out.items()), taken_in=self._taken_in))

    def _beat(self, beat: m.Heartbeat) -> None:
        now = time.monotonic()
        self._client.ask(
            self._channel, beat, "heartbeat", (), lambda body, frames: self._heard(body, now), self._take_news
        )

    def _figures(self) -> m.Heartbeat:
        """Return a heartbeat with all figures."""
        seen = [m.Sighting(one.role, one.rank, *process_state(one.pid)) for one in self._suspects]
        beat = m.Heartbeat(self.round, seen, _memory(), traffic.sent, traffic.received, list(self._taken_out.items()))
        beat.work = traffic.parts
        beat.taken_in = self._taken_in
        self._add_figures(beat)
        beat.reports = reports.own().take() if self._settings.role == "worker" else []
        beat.progress, beat.trace = reports.own().progress(), self._recording.take(self._clock)
        self._is_beat_due |= self._recording.has_more
        return beat

    def _ask_to_leave(self) -> None:
        wish, self._wish = self._wish, ""

        def refused(body: m.Failed) -> None:
            self.refusal = body.text
            self._on_change()

        agreed = m.News([], False, leave=wish)
        self._client.ask(self._channel, m.Notice(wish), "notice", (), lambda *_: self._take_leave(agreed), refused)

    def _take_leave(self, news: m.News) -> None:
        if news.leave and not self.leave_for:
            self.leave_for = news.leave
            self._on_change()

    def _heard(self, body: m.Body, sent: float) -> None:
        """Take the answer to a heartbeat: its news, and the scheduler's clock."""
        if isinstance(body, m.News) and body.at:
            now, self._recording.wanted, self.fastest_s = time.monotonic(), body.trace, body.fastest_s
            self._clock.note(sent, body.at, now)
            if ring.active is not None:
                ring.active.align(self._clock.offset, self._clock.error(now))
        self._take_news(body)

    def _take_news(self, body: m.Body) -> None:
        now = time.monotonic()
        self._log(self._liveness.note_heard(self._scheduler, now))
        if not isinstance(body, m.News):
            return
        self._wait_longer(now)
        self._take_leave(body)
        self._suspects = body.suspects
        if body.generation > self.groups[0]:
            self.groups = (body.generation, body.groups)
        for death in body.deaths[len(self.deaths) :]:
            ring.note(events.DIED, 0, events.member(death.role, death.rank))
        if body.deaths and self.failure is None:
            self.deaths = body.deaths
            self._fail(describe_all(body.deaths))
        if body.number >= self._number:  # else it is an answer that was on its way for long
            self._number = body.number
            self._follow(body)
        if body.shutdown and not self.shutdown:
            self.shutdown = True
            self._on_change()

    def _follow(self, news: m.News) -> None:
        """Take the news of who is there."""
        for death in [one for one in news.lost if one not in self.lost]:
            ring.note(events.DIED, 0, events.member(death.role, death.rank))
            if self._settings.role == "worker" and death.rank != self._settings.rank:  # else that was another process
                logger.warning("%s; the others go on without it", describe(death))
        before = self.left, self.joiners, self.came, self.rejoined
        self.lost, self.left = news.lost, frozenset(news.left)
        self.joiners, self.came, self.rejoined = news.joiners, news.came, news.rejoined
        if before != (self.left, self.joiners, self.came, self.rejoined):
            self._on_change()

    def _watch_scheduler(self, now: float) -> None:
        seat, liveness = self._scheduler, self._liveness
        liveness.turn([seat], now, is_supervised=True)  # its port tells whether it runs
        seat.closed_since = None if self._hub.is_open(self._channel) else seat.closed_since or now
        if self.failure is not None or self.shutdown:
            return
        seat.host_silent_s = self._hub.host_silent_s(self._channel)
        if seat.member.host_id == self._hello.host_id and liveness.suspects([seat], now):
            liveness.note_state(seat, *process_state(seat.member.pid), now)
        if self._hub.is_deserted(self._channel):
            liveness.note_state(seat, GONE[0], 0.0, now)
        reason = liveness.why_dead(seat, True, now)
        if reason:
            self._fail(describe(m.Death("scheduler", 0, seat.member.host, reason)))
            return
        self._log(liveness.warnings([seat], True, now))

    def _log(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Warn):
                logger.warning("%s", action.text)

    def _fail(self, why: str) -> None:
        self.failure = PeerDiedError(why)
        self._on_change()

    def _say_goodbye(self, reason: str) -> None:
        began = time.monotonic()
        self._note(events.LEFT, bool(reason))
        bye = self._client.ask(self._channel, m.Bye(plain_lines(reason), self.round), "leaving")
        while not bye.done and time.monotonic() < began + self._bye_timeout_s and self._may_hear():
            self._client.poll(_BYE_CHECK_INTERVAL_S)
            self._watch_scheduler(time.monotonic())

    @property
    def _bye_timeout_s(self) -> float:
        return BYE_TIMEOUT_S if self.failure is None else _FAILED_BYE_TIMEOUT_S

    def _may_hear(self) -> bool:
        """Whether the scheduler is connected, or a lost connection may come back: it has not ended with the job."""
        return self._hub.is_open(self._channel) or (self.failure is None and not self.shutdown)

    # ---- from other threads ----------------------------------------------------------------------------------------

    def note_taken_out(self, worker: int, round: int) -> None:
        """Tell the scheduler that this server waits no more for a dead worker, whose last round here this is."""
        self._taken_out = {**self._taken_out, worker: round}
        self.beat_soon()

    def ask_to_leave(self, why: str) -> None:
        """Have the scheduler asked whether this worker may leave. It takes no lock, for handlers of signals."""
        self._wish = why

    def note_taken_in(self, known: list[m.TakenIn]) -> None:
        """Tell the scheduler which members that are not the first of their rank this server knows."""
        if known == self._taken_in:
            return
        new = {(one.rank, one.incarnation) for one in known} - {(one.rank, one.incarnation) for one in self._taken_in}
        again = {rank for rank, _ in new}
        self._taken_out = {rank: round for rank, round in self._taken_out.items() if rank not in again}
        self._taken_in = known
        self.beat_soon()

    def beat_soon(self) -> None:
        """Send a heartbeat now: there is news in it."""
        self._is_beat_due = True
        self._client.wake()

    def is_noted(self, worker: int) -> bool:
        """Tell whether :meth:`note_taken_out` was called for a worker."""
        return worker in self._taken_out

    def leave(self, reason: str = "") -> None:
        """Leave the job. With a reason it is a failure, and ends the job for all. Idempotent.

        Does nothing in a forked child.
        """
        if os.getpid() != self._hello.pid:
            return
        if self._bye is None:
            self._bye = reason
            if self._thread.is_alive():
                self._client.wake()
                self._thread.join(_LEAVE_TIMEOUT_S)
        self._client.close()

    def check(self) -> None:
        """Raise the failure of the job, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))
