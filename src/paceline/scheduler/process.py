"""The scheduler process: one loop around the membership of the job."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Sequence
from socket import gethostname

import msgspec

from paceline.config import Settings
from paceline.errors import PacelineError
from paceline.host.descriptors import raise_limit_for
from paceline.host.plain_text import described
from paceline.membership import Action, Finish, Membership, Warn, describe
from paceline.net import Security
from paceline.net.answerer import Answerer
from paceline.net.claims import Bounds
from paceline.net.hosts import bind_address, host_id, process_state
from paceline.net.sockets import SocketListener
from paceline.observe import events, ring
from paceline.observe.clocks import RoundTrips
from paceline.observe.logs import set_up_logging
from paceline.observe.recording import Recording
from paceline.scheduler.exports import Exports
from paceline.scheduler.journal import Journal
from paceline.scheduler.launcher import JobEnds, Launcher, StartProgress, StatusWanted
from paceline.wire import messages as m
from paceline.wire.limits import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

#: Interval of liveness checks: each looks at all members. Requests are carried out at once. Connections that close, and
#: processes whose end the launcher tells, are looked at at once.
CHECK_INTERVAL_S = 0.2

#: Bytes of one member's requests that wait, and of answers that it has not confirmed or leaves unread.
MAX_KEPT_BYTES = 4 * MAX_HEADER_BYTES


class Scheduler:
    """Runs :class:`~paceline.membership.Membership` over a listener."""

    def __init__(self, settings: Settings, listener: SocketListener, launcher: Launcher, exports: Exports) -> None:
        self._listener, self._launcher, self._exports = listener, launcher, exports
        self._journal = Journal(settings)
        self._host_id = host_id()
        self._membership = Membership(
            settings, time.monotonic(), lambda: secrets.token_bytes(16), os.getpid(), self._host_id
        )
        self._answerer = Answerer(listener, self._membership.is_member, most_bytes=MAX_KEPT_BYTES)
        self._interval_s, self._clock = settings.beat_interval_s, RoundTrips(is_same_clock=True)
        self._clock.note(0.0, 0.0, 0.0)
        if ring.active is not None:
            ring.active.align(0.0, 0.0)
        self._recording, self._next_events = Recording(), 0.0
        self._deaths = self._losses = 0

    def run(self) -> int:
        """Serve until the job has ended; returns the exit code."""
        due = -math.inf
        while True:
            lost = self._listener.lost()  # their earlier messages are among those received now
            for peer, frames in self._listener.receive(0.0 if lost else max(0.0, due - time.monotonic())):
                request = self._answerer.take(peer, frames)
                if request is None:
                    self._perform(self._membership.heard(peer, time.monotonic()))
                    continue
                seq, body, _ = request
                self._note(events.TOOK, peer, seq, body)
                self._carry_out(peer, seq, body)
            for peer in lost:
                self._membership.lost(peer, time.monotonic())
            ended, now = self._take_news_of_launcher(), time.monotonic()
            if now < due and not lost and not ended:
                continue
            due = now + CHECK_INTERVAL_S
            self._look_around(now)
            self._take_events(now)
            code = self._perform(self._membership.tick(time.monotonic()))
            self._exports.note(self._membership, time.monotonic())
            if code is not None:
                self._exports.close(self._membership)
                return code

    def _carry_out(self, peer: bytes, seq: int, body: m.Request) -> None:
        try:
            self._perform(self._membership.handle(peer, seq, body, time.monotonic()))
            self._answerer.admit(peer)  # the answer to a Hello may come much later
        except Exception as error:
            # Process border: a defect here must not end the job of all. The peer gets the error, and the log the rest.
            logger.exception("a %s of peer %r failed", type(body).__name__, peer)
            self._answerer.answer(peer, seq, m.Failed("RemoteError", described(error)))

    def _take_news_of_launcher(self) -> bool:
        """Take the news of the launcher; tells whether processes have ended."""
        has_ended = False
        for one in self._launcher.news():
            now = time.monotonic()
            if isinstance(one, StartProgress):
                self._membership.note_cpu((one.role, one.rank), one.cpu_s, now, one.is_ready)
            elif isinstance(one, StatusWanted):
                self._launcher.report_status(msgspec.json.encode(self._membership.status(now)).decode())
            elif isinstance(one, JobEnds):
                self._membership.notices.is_ending = True
            else:
                self._perform(self._membership.ended(*one, now))
                has_ended = True
        self._membership.is_supervised = self._launcher.reports_ends
        return has_ended

    def _look_around(self, now: float) -> None:
        """Note the kernels' knowledge of the members' hosts, and of silent processes of this host."""
        for peer in self._membership.lifelines(now):
            self._membership.note_host(peer, self._listener.host_silent_s(peer))
        for suspect in self._membership.suspects(now):
            if suspect.member.host_id == self._host_id:
                self._membership.note_state(suspect, *process_state(suspect.member.pid), now)

    def _note(self, kind: int, peer: bytes, seq: int, body: m.Body) -> None:
        """Note a request of a member, or its answer."""
        if isinstance(body, (m.Heartbeat, m.News)):  # a union would be made anew each time
            return
        key = self._membership.member_of(peer)
        if key is not None and seq:
            ring.note(kind, seq, events.member(*key), m.TAGS[type(body)])

    def _take_events(self, now: float) -> None:
        """Take the scheduler's own events for a trace, as often as members' events."""
        self._recording.wanted = self._membership.traces.number
        if self._recording.wanted and now >= self._next_events:
            self._next_events = now + self._interval_s
            me = m.Member("scheduler", 0, 0, gethostname(), self._host_id, os.getpid(), "", b"")
            own = self._recording.take(self._clock)
            if own is not None:
                self._membership.note_trace(me, own, time.monotonic())

    def _report(self) -> None:
        """Tell the launcher how the job goes."""
        self._report_losses()
        for death in self._membership.deaths[self._deaths :]:
            ring.note(events.DIED, 0, events.member(death.role, death.rank))
        self._deaths = len(self._membership.deaths)
        for member in self._membership.notices.left():
            self._launcher.report_left(member.role, member.rank)
        if self._membership.complete:
            self._launcher.report_complete()
        elif text := self._membership.advice.why_alone():
            self._launcher.report_alone(text)
        if self._membership.cause is not None:
            cause = self._membership.cause
            self._launcher.report_failure(cause.role, cause.rank, cause.reason)
        if self._membership.has_succeeded:
            self._launcher.report_over()

    def _report_losses(self) -> None:
        history = self._membership.losses.history
        for one in history[self._losses :]:
            if isinstance(one, m.Death):
                ring.note(events.DIED, 0, events.member(one.role, one.rank))
                self._launcher.report_loss(one.role, one.rank, one.reason)
            else:
                self._launcher.report_joined("worker", one)
        self._losses = len(history)

    def _perform(self, actions: Sequence[Action]) -> int | None:
        self._report()  # before anybody can end because of it
        self._journal.write(self._membership.log.take())
        for action in actions:
            if isinstance(action, Finish):
                for death in self._membership.deaths:
                    logger.error("the job failed: %s", describe(death))
                for death in self._membership.losses.deaths.values():
                    logger.warning("%s; the others went on", describe(death))
                return action.code
            if isinstance(action, Warn):
                logger.warning("%s", action.text)
                continue
            self._note(events.ANSWERED, action.peer, action.seq, action.body)
            self._answerer.answer(action.peer, action.seq, action.body)
        return None


def main(settings: Settings) -> int:
    """Run the scheduler of a job; returns the exit code."""
    set_up_logging(settings)
    ring.start(settings)
    try:
        security, exports = Security.of(settings), Exports(settings)
        if security.weakness:  # here and nowhere else: one line for the job
            logger.warning("%s", security.weakness)
        workers, servers = settings.num_workers, settings.num_servers
        raise_limit_for(2 * workers + servers, f"the scheduler of {workers} workers")
        bounds, address = (
            Bounds.of_job(workers + servers, MAX_HEADER_BYTES),
            bind_address(settings.scheduler, settings.ports),
        )
        listener = SocketListener([address], security, "scheduler", watch=True, bounds=bounds)
    except (PacelineError, OSError) as error:
        logger.error("%s", error)
        return 1
    try:
        launcher = Launcher.from_environment()
        launcher.announce(listener.addresses[0])
        return Scheduler(settings, listener, launcher, exports).run()
    finally:
        listener.close(linger_s=1.0)
