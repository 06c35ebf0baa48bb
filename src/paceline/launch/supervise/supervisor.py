"""The loop around :class:`~paceline.launch.supervise.lifecycle.Lifecycle`: processes, pipes, signals and the clock."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from paceline.errors import LaunchError
from paceline.launch.plan import Late, Member, Plan, ProcessSpec
from paceline.launch.supervise.console import Console
from paceline.launch.supervise.crew import Crew
from paceline.launch.supervise.events import (
    Action,
    Event,
    Exited,
    Finish,
    Interrupted,
    Lost,
    NotStarted,
    Ready,
    Signal,
    Start,
    Started,
    Stopped,
    Tick,
    Warn,
)
from paceline.launch.supervise.guardian import Guardian
from paceline.launch.supervise.lifecycle import Lifecycle
from paceline.launch.supervise.ready import EndedPipe, ReadyPipe
from paceline.launch.supervise.report import failure_block
from paceline.launch.supervise.signals import SignalPipe

#: How long what a process left behind may take to exit by itself (Python's resource tracker does); then SIGTERM.
_LEFTOVERS_S = 1.0
_LEFTOVERS_CHECK_S = 0.02

Located = Callable[[str | None], Mapping[Late, str]]


class Supervisor:
    """Runs one plan on this machine to its end and leaves nothing running.

    Args:
        plan: what to run.
        known: the late values known before the start.
        located: gives the late values that follow from the scheduler's address (None: the job has no scheduler).
        environ: what every process inherits.
    """

    def __init__(self, plan: Plan, known: Mapping[Late, str], located: Located, environ: Mapping[str, str]) -> None:
        self._plan = {process.member: process for process in plan}
        self._graces = plan.graces
        self._known = dict(known)
        self._located = located
        self._environ = dict(environ)
        self._code: int | None = None
        self._interrupted = False
        self._ready: ReadyPipe | None = None
        self._ended: EndedPipe | None = None

    def run(self) -> int:
        """Run the job and return its exit code. Once only, and in the main thread, because it handles signals."""
        guardian = Guardian()
        self._console = Console()
        with selectors.DefaultSelector() as self._selector, SignalPipe() as self._signals:
            self._selector.register(self._signals.fd, selectors.EVENT_READ, self._read_signals)
            self._crew = Crew(self._selector, self._console, guardian.register)
            try:
                code = self._run()
            finally:
                guardian.close()
                self._crew.close()
                self._close_ready()
                if self._ended is not None:
                    self._ended.close()
            self._report()
        return code

    def _run(self) -> int:
        self._lifecycle = Lifecycle(list(self._plan), self._graces, time.monotonic())
        if Member("scheduler", 0) not in self._plan:
            self._known |= self._located(None)
        self._act(self._lifecycle.begin())
        while self._code is None:
            self._wait(self._lifecycle.deadline)
            self._feed(Tick())
        self._end_leftovers()
        return self._code

    def _report(self) -> None:
        failure = self._lifecycle.failure
        if failure is not None:
            tail = self._console.tail(failure.member)
            self._console.block(failure_block(failure, tail, self._lifecycle.aftermath))

    def _wait(self, deadline: float | None) -> None:
        """Wait for the next event, until the deadline at most, and handle it."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._console.broken and not self._interrupted:  # as in: paceline launch … | head
            self._interrupt(signal.SIGPIPE)

    def _feed(self, event: Event) -> None:
        self._act(self._lifecycle.handle(event, time.monotonic()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(members):
                    self._start(members)
                case Signal(signum, members):
                    self._crew.send(signum, members)
                case Warn(text):
                    self._console.say(text)
                case Finish(code):
                    self._code = code

    def _start(self, members: tuple[Member, ...]) -> None:
        for member in members:
            try:
                self._start_one(member)
            except LaunchError as error:
                self._feed(NotStarted(member, str(error)))
                return
            self._feed(Started(member))

    def _start_one(self, member: Member) -> None:
        process = self._plan[member]
        if member.role == "scheduler":
            self._start_scheduler(process)
        else:
            self._crew.start(member, process.argv, self._environ | process.environment(self._known))

    def _start_scheduler(self, process: ProcessSpec) -> None:
        self._ready, self._ended = ready, ended = ReadyPipe(), EndedPipe()
        self._selector.register(ready.fd, selectors.EVENT_READ, partial(self._read_ready, process.member))
        try:
            fds = {Late.READY_FD: str(ready.write_fd), Late.ENDED_FD: str(ended.read_fd)}
            env = process.environment(self._known | fds)
            self._crew.start(process.member, process.argv, self._environ | env, [ready.write_fd, ended.read_fd])
        finally:
            ready.close_write()
            ended.close_read()

    def _read_ready(self, scheduler: Member) -> None:
        """Take in what the scheduler says: its address first, then the first failure."""
        if self._ready is None:
            return
        if self._ready.has_address:
            for member, reason in self._ready.failures():
                self._feed(Lost(member, reason))
            if self._ready.ended:
                self._close_ready()
            return
        try:
            address = self._ready.read()
        except ValueError as error:
            self._close_ready()
            self._feed(NotStarted(scheduler, str(error)))
            return
        if address:
            self._known |= self._located(address)
            self._feed(Ready())
        elif address is not None:  # it is on its way out, or its deadline will come
            self._close_ready()

    def _close_ready(self) -> None:
        if self._ready is not None:
            self._selector.unregister(self._ready.fd)
            self._ready.close()
            self._ready = None

    def _read_signals(self) -> None:
        for signum in self._signals.read():
            self._interrupt(signum)
        self._feed(Stopped(self._crew.stopped()))
        ended = self._crew.ended()
        for member, code in ended:
            if self._ended is not None and member.role != "scheduler":
                self._ended.write(member, code)
        if ended and self._ready is not None and self._ready.has_address:
            self._read_ready(Member("scheduler", 0))  # what it said before it ended comes first
        for member, code in ended:
            self._feed(Exited(member, code))

    def _interrupt(self, signum: int) -> None:
        self._interrupted = True
        self._feed(Interrupted(signum))

    def _end_leftovers(self) -> None:
        """Let what the processes left behind exit by itself, then terminate it. The guardian kills the rest."""
        self._interrupted = False
        if self._wait_for_leftovers():
            return
        members = self._crew.living()
        self._console.say(f"terminating what {', '.join(str(member) for member in members)} left running")
        self._crew.send(signal.SIGTERM, members)
        self._wait_for_leftovers()

    def _wait_for_leftovers(self) -> bool:
        """Return whether nothing is left."""
        until = time.monotonic() + _LEFTOVERS_S
        while self._crew.living():
            if self._interrupted or time.monotonic() > until:
                return False
            self._wait(time.monotonic() + _LEFTOVERS_CHECK_S)
        return True
