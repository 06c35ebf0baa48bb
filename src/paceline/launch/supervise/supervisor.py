"""The loop around the :class:`~paceline.launch.supervise.lifecycle.JobLifecycle`: processes, pipes, signals, clock."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline import config
from paceline.errors import LaunchError
from paceline.host.exitcodes import WORKER_LOST
from paceline.host.own_time import OwnTime
from paceline.host.plain_text import described
from paceline.launch import runtime
from paceline.launch.backends import Job
from paceline.launch.host_list import LOCALHOST
from paceline.launch.plan import SCHEDULER, JobPlan, Late, ProcessName
from paceline.launch.processes import birth
from paceline.launch.supervise import events as e
from paceline.launch.supervise.blame import failure_block, lost_block
from paceline.launch.supervise.child import ENDING, FOR_WORKERS, SignalPipe
from paceline.launch.supervise.console import Console
from paceline.launch.supervise.crew import ENDS, STATUS, Processes, Take
from paceline.launch.supervise.guardian import Guardian
from paceline.launch.supervise.lifecycle import JobLifecycle, Phase
from paceline.naming import listed
from paceline.net.security import new_job_key
from paceline.observe import ring
from paceline.observe.table import plural

if TYPE_CHECKING:
    from paceline.launch.supervise.job_watch import Watch

#: How long leftover processes may take to exit by themselves (Python's resource tracker does); then SIGTERM.
_LEFTOVERS_S = 1.0
_LEFTOVERS_CHECK_S = 0.02

#: Interval at which processes are looked at until all have joined: the scheduler waits for those that get CPU time.
_START_LOOK_S = 1.0

#: Longest wait for an event, and so the longest time between two looks at the clock in which the launcher runs.
_LONGEST_TURN_S = 4.0

#: How long the last lines of a job that a signal has ended wait for a reader.
_UNREAD_S = 2.0


def _sentence(env: Mapping[str, object]) -> str:
    """Return what ``dist_auto`` does and why, from a worker's variables."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # workers refuse other values
        return str(json.loads(str(env[config.variable("choice")]))["sentence"])
    return ""


def _record_of(plan: JobPlan, known: Mapping[Late, str]) -> runtime.JobRecord:
    roles = [process.role for process in plan]
    worker = next(process for process in plan if process.role == "worker")
    return runtime.JobRecord(
        plan.job_id,
        os.getpid(),
        birth(os.getpid()),
        time.time(),
        shlex.join(worker.argv),
        tuple(host.name for host in plan.hosts),
        roles.count("worker"),
        roles.count("server"),
        key=known.get(Late.JOB_KEY, ""),
        choice=_sentence(worker.env),
    )


@dataclass(frozen=True)
class Surroundings:
    """The supervisor's objects that a crew uses."""

    selector: selectors.BaseSelector
    """The loop's selector; it calls the data of registered files."""
    console: Console
    register: Callable[[], None]
    """Makes a child known to the guardian."""
    take: Take
    """Takes events."""
    known: Mapping[Late, str]
    """The late values known before the start."""


CrewMaker = Callable[[Surroundings], Processes]


class Supervisor:
    """Runs one plan to its end and leaves nothing running; ``known`` are the late values known before the start."""

    def __init__(self, plan: JobPlan, known: Mapping[Late, str], make_crew: CrewMaker) -> None:
        self._processes = {process.member: process for process in plan}
        self._plan = plan
        self._known = dict(known)
        self._restart = int(known.get(Late.RESTART, "0"))
        self._make_crew = make_crew
        self._code: int | None = None
        self.interrupted = False
        """Whether a signal ended the job."""
        self._is_hurried = False
        """A signal came, that leftover processes are not waited for."""
        self._lifecycle: JobLifecycle | None = None
        self._next_look = math.inf
        self._own_time, self._lost_s = OwnTime(time.monotonic(), _LONGEST_TURN_S), 0.0
        """Time in which the launcher was paused: it has seen nothing of the job, so no deadline of the job ran."""
        self._watch: Watch | None = None
        self._job = _record_of(plan, self._known)

    def run(self) -> int:
        """Run the job and return its exit code. Once only, and in the main thread, because it handles signals.

        Raises:
            paceline.errors.LaunchError: no process could be started, and why.
        """
        is_watched = not self._plan.quiet and self._plan.scheduler is not None
        with (
            contextlib.closing(Guardian()) as guardian,  # forked first
            selectors.DefaultSelector() as self._selector,
            SignalPipe() as self._signals,
        ):
            self._selector.register(self._signals.fd, selectors.EVENT_READ, self._read_signals)
            self._console = Console(log_dir=self._plan.log_dir, has_panel=is_watched)
            try:
                code = self._run_with(guardian, is_watched)
            finally:
                signum = self._end_output()
        return code or (128 + signum if signum else 0)

    def _run_with(self, guardian: Guardian, is_watched: bool) -> int:
        with contextlib.ExitStack() as ends:  # all of them happen, whichever fails; the last one is the first
            ends.callback(self._forget)
            ends.callback(self._console.close_files)
            around = Surroundings(self._selector, self._console, guardian.register, self._take, self._known)
            self._crew = self._make_crew(around)
            for end in (self._crew.close, guardian.close, self._crew.finish, self._end_watch):
                ends.callback(end)
            if is_watched and self._crew.hears_scheduler:
                from paceline.launch.supervise.job_watch import Watch  # takes msgspec

                self._watch = Watch(self._job, self._console, time.monotonic())
            code = self._run()
        self._report()
        return code

    def _end_watch(self) -> None:
        self._watch = None
        self._console.close_panel()

    def _run(self) -> int:
        while self._code is None and self._crew.opening():  # a signal may come first
            self._wait(None)
        return self._supervise() if self._code is None else self._code

    def _supervise(self) -> int:
        may_go_on = self._crew.hears_scheduler and self._plan.may_go_on(os.environ)
        members, must_join = list(self._processes), self._plan.needs_backend
        self._lifecycle = JobLifecycle(
            members, self._plan.graces, self._now(), may_go_on, must_join, self._plan.replace
        )  # fmt: skip
        if SCHEDULER in self._processes:
            self._next_look = time.monotonic() + _START_LOOK_S
        else:
            self._learn(None)
        self._act(self._lifecycle.begin())
        while self._code is None:
            due = self._lifecycle.next_at
            self._wait(min(self._next_look, math.inf if due is None else due + self._lost_s))
            self._look_at_start(self._lifecycle, time.monotonic())
            self._take(e.Tick())
        self._end_leftovers()
        return self._code

    def _look_at_start(self, lifecycle: JobLifecycle, now: float) -> None:
        if now >= self._next_look:
            self._next_look = now + _START_LOOK_S
            self._crew.look(tuple(lifecycle.alive))

    def _record(self, scheduler: str | None) -> None:
        """Tell ``paceline status`` of this job. A job runs without that if its file cannot be written."""
        with contextlib.suppress(OSError, LaunchError):
            runtime.write(replace(self._job, scheduler=scheduler or ""))
            if self._plan.scheduler is not None:
                ring.note_hosts(
                    self._job.id, self._job.key, [one for one in self._job.hosts if one != LOCALHOST], self._restart
                )

    def _forget(self) -> None:
        with contextlib.suppress(OSError, LaunchError):
            runtime.remove(self._plan.job_id)

    def _learn(self, scheduler: str | None) -> None:
        self._record(scheduler)
        self._known |= self._crew.late(scheduler)

    def _report(self) -> None:
        if self._lifecycle is None:
            return
        blame = self._lifecycle.blame
        for death in blame.survived.values():
            self._console.block(lost_block(death, *self._tail_and_host(death.member)))
        if blame.cause is not None:
            tail, host = self._tail_and_host(blame.cause.member)
            which = f" --start {self._restart}" if self._plan.max_restarts else ""
            story = f"{self._plan.job_id}{which}" if self._plan.scheduler is not None else ""
            self._console.block(failure_block(blame.cause, tail, blame.aftermath, host, story))

    def _tail_and_host(self, member: ProcessName) -> tuple[list[bytes], str]:
        return self._console.tail(member), self._processes[member].host

    def _now(self) -> float:
        """Return the time on the job's clock."""
        return time.monotonic() - self._lost_s

    def _wait(self, deadline: float | None) -> None:
        """Wait for the next event, until the deadline at most, and handle it."""
        if self._console.is_full:
            self._await_reader(lambda: self.interrupted or not self._console.is_full, self._heed_signals)
            self._crew.check()  # the signals of processes that have ended meanwhile are read
        if self._console.is_full:
            self._console.drop()
        watched = None if self._watch is None else self._watch.due
        now = time.monotonic()
        deadlines = [one for one in (deadline, self._crew.deadline(), watched) if one is not None]
        with self._writing(self._selector):
            events = self._selector.select(max(0.0, min([*deadlines, now + _LONGEST_TURN_S]) - now))
            self._lost_s += self._own_time.lost_s(time.monotonic())
            for key, _ in events:
                key.data()
        if self._crew.deadline() is not None:
            self._crew.check()
        self._show_progress(None)
        if self._console.broken and not self._is_hurried:  # as in: paceline launch … | head
            self._interrupt(signal.SIGPIPE)

    @contextlib.contextmanager
    def _writing(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Have output written in the block as soon as somebody reads."""
        outlet = self._console.waits_for
        if outlet is not None:
            selector.register(outlet.fd, selectors.EVENT_WRITE, self._console.flush)
        try:
            yield
        finally:
            if outlet is not None:
                selector.unregister(outlet.fd)

    def _await_reader(self, is_enough: Callable[[], bool], heed: Callable[[], None], until: float = math.inf) -> None:
        """Write output and heed signals, and do nothing else, until enough of it has been read.

        Nobody reads on a terminal after Ctrl-S, or in a pipe whose reader is stopped. Then the launcher is paused, and
        after a while its processes are, in their own writes.
        """
        while not is_enough() and time.monotonic() < until:
            with selectors.DefaultSelector() as selector, self._writing(selector):
                selector.register(self._signals.fd, selectors.EVENT_READ, heed)
                for key, _ in selector.select(min(until - time.monotonic(), _LONGEST_TURN_S)):
                    key.data()

    def _end_output(self) -> int:
        """Wait until the last lines are read, for a short time only after a signal; return one that ends the wait."""
        came: list[int] = []
        until = time.monotonic() + _UNREAD_S if self.interrupted else math.inf

        def heed() -> None:
            for signum in self._signals.read():
                if signum in ENDING:
                    came.append(signum)
                elif signum == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)

        self._await_reader(lambda: bool(came) or self._console.waits_for is None, heed, until)
        self._console.release()
        return came[0] if came else 0

    def _show_progress(self, said: e.StatusSaid | None) -> None:
        """Show how the job does, from the scheduler's answer or as time passes. The job goes on where that fails."""
        if self._watch is None:
            return
        try:
            if said is not None:
                self._watch.take(said.text, time.monotonic())
            elif self._watch.turn(time.monotonic(), self._awaited()):
                self._crew.tell_scheduler(STATUS)
        except Exception as error:  # noqa: BLE001 - border: what is only looked at ends no job
            self._watch = None
            self._console.close_panel()
            self._console.say(f"the progress of the job is shown no more: {described(error)}")

    def _awaited(self) -> str:
        """Return the reason why the launcher waits: before the scheduler listens, and at the end of the job."""
        hosts = listed(self._job.hosts, 4)
        if self._lifecycle is None:
            return f"waiting for {hosts} to answer"
        match self._lifecycle.phase:
            case Phase.STARTING:
                return "waiting for the scheduler to listen"
            case Phase.RUNNING:
                return ""
        return f"the job ends: waiting for {plural(len(self._lifecycle.alive), 'process', 'processes')} to exit"

    def _take(self, event: e.Event) -> None:
        if isinstance(event, e.StatusSaid):
            self._show_progress(event)
            return
        if isinstance(event, e.Ready):
            self._learn(event.address)
        if isinstance(event, e.Complete):
            self._next_look = math.inf
        if self._lifecycle is not None:
            self._act(self._lifecycle.handle(event, self._now()))

    def _act(self, actions: list[e.Action]) -> None:
        for action in actions:
            match action:
                case e.StartProcesses(members):
                    self._start(members)
                case e.Signal(signum, members):
                    if signum == signal.SIGTERM:
                        self._crew.tell_scheduler(ENDS)
                    self._crew.send(signum, members)
                case e.Look(members):
                    self._crew.look(members)
                case e.ShowLine(text):
                    self._console.say(text)
                case e.JobEnded(code):
                    self._code = code

    def _start(self, members: tuple[ProcessName, ...]) -> None:
        for member in members:
            if self._lifecycle is None or self._lifecycle.blame.has_failed:
                return
            process, number = self._processes[member], self._lifecycle.replacing.number(member)
            if number:
                process = replace(process, env={**process.env, config.variable("incarnation"): str(number)})
            self._crew.start(process, self._known)

    def _read_signals(self) -> None:
        self._heed_signals()
        self._crew.check()

    def _heed_signals(self) -> None:
        for signum in self._signals.read():
            if signum in ENDING:
                self._interrupt(signum)
            else:
                self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        """Give a signal to the processes of the job. Ctrl-Z stops them, then the launcher, until it is continued."""
        is_passed_on = self._crew.pass_on(signum)
        if signum in FOR_WORKERS:
            what = "for the workers that handle it" if is_passed_on else "this launcher cannot pass it on"
            self._console.say(f"{signal.Signals(signum).name}: {what}")
        if signum == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _interrupt(self, signum: int) -> None:
        self.interrupted = self._is_hurried = True
        if self._lifecycle is None:
            self._code = 128 + signum
        else:
            self._take(e.Interrupted(signum))

    def _end_leftovers(self) -> None:
        """Let leftover processes exit by themselves, then terminate them. The guardian kills the rest."""
        self._is_hurried = False
        if self._wait_for_leftovers():
            return
        members = self._crew.living()
        self._console.say(f"terminating what {', '.join(str(member) for member in members)} left running")
        self._crew.send(signal.SIGTERM, members)
        self._wait_for_leftovers()

    def _wait_for_leftovers(self) -> bool:
        """Return whether none is left."""
        until = time.monotonic() + _LEFTOVERS_S
        while self._crew.living():
            if self._is_hurried or time.monotonic() > until:
                return False
            self._wait(time.monotonic() + _LEFTOVERS_CHECK_S)
        return True


class SupervisedJob(Job):
    """A job that this process supervises; it runs while :meth:`wait` does.

    Each run has a crew of its own; ``known`` are late values that are alike in all.
    """

    def __init__(self, plan: JobPlan, make_crew: CrewMaker, known: Mapping[Late, str] | None = None) -> None:
        self.plan, self.make_crew, self._known = plan, make_crew, dict(known or {})
        self.id = plan.job_id

    def wait(self) -> int:
        """Run the job until it ends well, is interrupted, or may not be started again; return its last exit code."""
        page = secrets.token_urlsafe(24)  # a page that is open shows the job that starts again
        for restart in range(self.plan.max_restarts + 1):
            known = {**self._known, Late.RESTART: str(restart), Late.PAGE_TOKEN: page}
            if self.plan.needs(Late.JOB_KEY):
                known[Late.JOB_KEY] = new_job_key()
            code, was_interrupted = self.run_once(known)
            if code in (0, WORKER_LOST) or was_interrupted or restart == self.plan.max_restarts:
                break
            print(f"[launch] restart {restart + 1} of {self.plan.max_restarts}", file=sys.stderr, flush=True)
        return code

    def run_once(self, known: Mapping[Late, str]) -> tuple[int, bool]:
        """Run the job once; return its exit code, and whether a signal ended it."""
        supervisor = Supervisor(self.plan, known, self.make_crew)
        return supervisor.run(), supervisor.interrupted
