"""When a job starts, fails and ends: a machine without processes, pipes or clock.

| phase | what runs |
|---|---|
| ``STARTING`` | the scheduler alone |
| ``RUNNING`` | everything |
| ``LEAVING`` | what has not exited yet: all workers have left the job |
| ``FAILING`` | the others, which report what they saw |
| ``INTERRUPTED`` | everything; the workers got the signal |
| ``TERMINATING`` | what has not exited yet; all got SIGTERM |
| ``KILLING`` | what has not exited yet; all got SIGKILL |
| ``OVER`` | nothing |

| from | to | when |
|---|---|---|
| ``STARTING`` | ``RUNNING`` | the scheduler listens, or the job has none |
| ``RUNNING`` | ``LEAVING`` | all workers have said goodbye (``Over``), or exited with 0, or died and others went on |
| ``STARTING``, ``RUNNING``, ``LEAVING`` | ``FAILING`` | an exit code is not 0, no start, or ``Lost`` |
| ``STARTING`` | ``FAILING`` | the scheduler exits with 0, or ``start_s`` has counted for it (``StartClock``) |
| ``RUNNING`` | ``FAILING`` | all that still runs has been stopped (SIGSTOP) for ``leave_s`` |
| ``LEAVING`` | ``FAILING`` | a worker hangs in its exit |
| ``STARTING``, ``RUNNING``, ``LEAVING`` | ``INTERRUPTED`` | a signal |
| ``LEAVING`` | ``TERMINATING`` | no worker is left, and servers and scheduler hang; or no ``Over`` in time |
| ``FAILING`` | ``TERMINATING`` | ``survivors_s`` has passed |
| ``INTERRUPTED`` | ``TERMINATING`` | ``interrupt_s`` has passed |
| ``FAILING``, ``INTERRUPTED`` | ``TERMINATING`` | no worker is left, and the cause is known, or ``leave_s`` later |
| ``FAILING`` | ``TERMINATING`` | a signal, or the scheduler did not start, or the worker hangs |
| ``INTERRUPTED``, ``TERMINATING`` | ``KILLING`` | a second signal |
| ``TERMINATING`` | ``KILLING`` | ``terminate_s`` has passed |
| ``KILLING`` | ``OVER`` | ``kill_s`` has passed |
| ``LEAVING``, ``FAILING``, ``INTERRUPTED``, ``TERMINATING``, ``KILLING`` | ``OVER`` | no process is left |

**A good end.** When all workers have said goodbye, the job has succeeded if the exit codes say so, however long the
exits take. The scheduler knows of the goodbyes (``Over``); its own exit code of 0 says the same. From then on only a
process that hangs is ended (:mod:`paceline.launch.supervise.exits`): a worker's hang is a failure, one of servers or
scheduler is not, since nobody needs them. That a server left too early is for the scheduler to say (``Lost``). Where no
worker has joined, the scheduler says nothing when they exit, and ends nothing: then ``UNJOINED_S`` counts.

**Blame.** The failure that is reported is the first *cause*. A process that fails because of another one may exit
before it, so the order of exits does not tell. The scheduler gets all exit codes, sees whose goodbye, silence, lost
connection or exit code came first, and names that process (``Lost``). This machine judges only what the scheduler
cannot: the scheduler itself. The cause is

1. the process that the scheduler names;
2. else the first whose exit code is neither 0 nor ``PEER_FAILED``;
3. else the scheduler, if it runs but names nobody: instead of 2, if it is stopped (SIGSTOP);
4. else the first that exited with ``PEER_FAILED``.

Its exit code is that of the job, or 1 if it has none.

Timeouts (:class:`~paceline.launch.spec.Graces`). Every phase but ``RUNNING`` has one, so no job hangs while it ends.
Processes are left only if the kernel cannot end them within ``kill_s``.
``survivors_s`` must exceed ``LAST_WORDS_S``, after which survivors learn of a death, plus the time in
which they report it and exit. ``survivors_s`` and ``leave_s`` must exceed the time in which the scheduler names a
process after it is told its exit code: 0.2 s on an idle machine.

**Deaths that others survive.** A job may go on when a worker dies (``--on-worker-death``); the scheduler decides. A
worker whose exit code is neither 0 nor ``PEER_FAILED`` then waits for its verdict (``Lost``): as long as other workers
run, which notice a scheduler that does not respond; ``leave_s`` after that, or if the scheduler is stopped. If the
others go on, the job's exit code is ``WORKER_LOST`` when it ends well.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import replace

from paceline.exitcodes import PEER_FAILED, WORKER_LOST
from paceline.launch.plan import ProcessName
from paceline.launch.spec import Graces
from paceline.launch.supervise.events import (
    Action,
    Complete,
    Event,
    Exited,
    Interrupted,
    JobEnded,
    Look,
    Lost,
    NotStarted,
    Over,
    Ready,
    Runs,
    ShowLine,
    Signal,
    Started,
    StartProcesses,
    Stopped,
    Tick,
)
from paceline.launch.supervise.exits import LOOK_S, Exits
from paceline.launch.supervise.report import Failure, describe
from paceline.start_clock import StartClock


class Phase(enum.Enum):
    """Phase of a job; the module's tables have the transitions."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    FAILING = enum.auto()
    INTERRUPTED = enum.auto()
    TERMINATING = enum.auto()
    KILLING = enum.auto()
    OVER = enum.auto()


#: How long servers and scheduler may stay if no worker is known to have joined: the news may be on its way.
UNJOINED_S = 1.0

_SCHEDULER = ProcessName("scheduler", 0)
_GOING_WELL = frozenset({Phase.STARTING, Phase.RUNNING, Phase.LEAVING})


class JobLifecycle:
    """The state of one job.

    Args:
        members: every process of the plan, in the order they start.
        graces: how long each phase may take.
        now: the time of the start, in seconds; later times are on the same clock.
        may_go_on: the job may go on when a worker dies; its scheduler decides.
    """

    def __init__(self, members: Sequence[ProcessName], graces: Graces, now: float, may_go_on: bool = False) -> None:
        self.members = tuple(members)
        self.graces = graces
        self.phase = Phase.STARTING
        self.deadline: float | None = None
        """When a :class:`Tick` is due, if one is."""
        self.failure: Failure | None = None
        self.aftermath: dict[ProcessName, int] = {}
        """Exit codes of the other processes that exited by themselves, in order."""
        self.lost: dict[ProcessName, Failure] = {}
        """Workers that died while the others went on."""
        self._may_go_on = may_go_on
        self._in_question: dict[ProcessName, int] = {}
        """Workers that have failed, and their exit codes, while the scheduler has not said whether the others go on."""
        self._exits: Exits | None = None
        """Of the processes that are left when all workers have said goodbye."""
        self._places: dict[ProcessName, str] = {}
        self.alive: dict[ProcessName, None] = {}
        """The processes that run, in the order of starting."""
        self._started: list[ProcessName] = []
        self._unfinished = {member for member in members if member.role == "worker"}
        self._signum = 0
        self._began, self._start_clock = now, StartClock(now)
        self._codes: dict[ProcessName, int] = {}
        self._is_named = False
        """The first cause is known: by the scheduler, or because this machine found it itself."""
        self._is_complete = False
        """All members have joined."""
        self._stopped: frozenset[ProcessName] = frozenset()

    def begin(self) -> list[Action]:
        """Return the first actions: the scheduler alone if there is one, because the others need its address."""
        scheduler = tuple(member for member in self.members if member.role == "scheduler")
        if not scheduler:
            self.phase = Phase.RUNNING
            return [StartProcesses(self.members)]
        self.deadline = self._began + self.graces.start_s
        return [StartProcesses(scheduler)]

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event and return what to do, in order."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case Started(member, place):
                self.alive[member], self._places[member] = None, place
                self._started.append(member)
                return []
            case Ready():
                return self._ready()
            case NotStarted(member, reason, code):
                self._fail(member, code, reason, now)
                self._is_named = True
                return self._finish_if_empty()
            case Stopped(members):
                self._stopped = members
                self._watch_stopped(now)
                return []
            case Lost(member, reason, True):
                return self._survived(member, reason, now)
            case Lost(member, reason):
                return self._lost(member, reason, now)
            case Exited(member, code, detail):
                return self._exited(member, code, describe(code, detail), now)
            case Complete():
                self._is_complete = True
                return []
            case Over():
                self._wait_for_exits(now)
                return []
            case Runs():
                return self._runs(event, now)
            case Interrupted(signum):
                return self._interrupted(signum, now)
            case Tick():
                return self._late(now) if self.deadline is not None and now >= self.deadline else []

    @property
    def code(self) -> int:
        """The exit code of the job as things stand."""
        if self.failure is not None:
            return self.failure.code
        if self._signum:
            return 128 + self._signum
        return WORKER_LOST if self.lost else 0

    def check(self) -> None:
        """Assert what is always true."""
        assert set(self.alive) <= set(self._started) <= set(self.members)
        assert (self.deadline is None) <= (self.phase in (Phase.RUNNING, Phase.OVER))
        assert (self.failure is None) or self.phase not in _GOING_WELL
        assert self.phase is not Phase.LEAVING or self._exits is not None or not self._unfinished

    def _ready(self) -> list[Action]:
        if self.phase is not Phase.STARTING:
            return []
        self.phase, self.deadline = Phase.RUNNING, None
        return [StartProcesses(tuple(member for member in self.members if member.role != "scheduler"))]

    def _exited(self, member: ProcessName, code: int, how: str, now: float) -> list[Action]:
        self.alive.pop(member, None)
        self._codes[member] = code
        if member == _SCHEDULER and self._in_question:
            self._decide_question(now)
        if self.phase is Phase.FAILING:
            self._add_to_failure(member, code, how, now)
        elif self.phase in _GOING_WELL:
            self._judge(member, code, how, now)
        self._watch_stopped(now)
        return self._finish_if_empty() or self._terminate_idle(now)

    def _watch_stopped(self, now: float) -> None:
        """Set a deadline where nobody else would notice: all that runs is stopped, or a verdict does not come."""
        is_still = self._lacks_verdict() or self._stopped.issuperset(self.alive)
        if self.phase is Phase.RUNNING and self.deadline is None and is_still:
            self.deadline = now + self.graces.leave_s

    def _lacks_verdict(self) -> bool:
        """Tell whether a verdict is to come, and no worker runs or the scheduler is stopped."""
        return bool(self._in_question) and (not self._workers() or _SCHEDULER in self._stopped)

    def _lost(self, member: ProcessName, reason: str, now: float) -> list[Action]:
        """Take in which process failed first, as the scheduler saw it."""
        if self._is_named or (self.failure is None and self.phase not in _GOING_WELL):
            return []
        self._is_named = True
        first, code = self.failure, self._codes.get(member, 0)
        if first is None:
            self._fail(member, code or 1, describe(code, reason), now)
        elif first.member != member:
            self.aftermath = {first.member: first.code, **self.aftermath}
            self.aftermath.pop(member, None)
            self.failure = Failure(member, code or 1, describe(code, reason), first.after_s)
        else:
            self.failure = replace(first, reason=describe(first.code, reason))
        return self._terminate_idle(now)

    def _terminate_idle(self, now: float) -> list[Action]:
        """End servers and scheduler if they have nobody left to work for, and can tell no more about why."""
        if self._workers() or self.phase not in (Phase.FAILING, Phase.INTERRUPTED) or not self.alive:
            return []
        if self.phase is Phase.INTERRUPTED or self._is_explained():
            return self._terminate(now)
        latest = now + self.graces.leave_s
        self.deadline = min(self.deadline or latest, latest)
        return []

    def _is_explained(self) -> bool:
        """Tell whether nobody's end can tell more about why the job failed."""
        if self.failure is None or self._is_named:
            return self.failure is not None
        return self.failure.code > 128 or (self.failure.code != PEER_FAILED and _SCHEDULER not in self.alive)

    def _survived(self, member: ProcessName, reason: str, now: float) -> list[Action]:
        """Go on without a worker."""
        code = self._codes.get(member, 0)
        self.lost[member] = Failure(member, code or WORKER_LOST, describe(code, reason), now - self._began)
        self._in_question.pop(member, None)
        if member not in self.alive:
            self._finish_worker(member, now)
        return [ShowLine(f"{member} died, the others go on: {self.lost[member].reason}")]

    def _judge(self, member: ProcessName, code: int, how: str, now: float) -> None:
        if member in self.lost:
            self.lost[member] = replace(self.lost[member], code=code or WORKER_LOST)
            self._finish_worker(member, now)
        elif self._may_be_survived(member) and code not in (0, PEER_FAILED):
            self._in_question[member] = code
        elif code != 0 and not (code == WORKER_LOST and member.role == "scheduler" and self.lost):
            self._fail(member, code, how, now)
        elif self.phase is Phase.STARTING:
            self._fail(member, 1, "exited before it reported its address", now)
        elif member.role == "worker":
            self._finish_worker(member, now)
        elif member == _SCHEDULER:
            self._wait_for_exits(now)

    def _may_be_survived(self, member: ProcessName) -> bool:
        is_running = self.phase is Phase.RUNNING and _SCHEDULER in self.alive
        return self._may_go_on and is_running and member.role == "worker"

    def _decide_question(self, now: float) -> None:
        """Count a death as a failure: the scheduler has not said that the others go on."""
        member, code = next(iter(self._in_question.items()))
        self._fail(member, code, describe(code), now)

    def _finish_worker(self, member: ProcessName, now: float) -> None:
        self._unfinished.discard(member)
        if not self._unfinished and self.phase is Phase.RUNNING:
            wait_s = self.graces.leave_s if self._is_complete else min(self.graces.leave_s, UNJOINED_S)
            self.phase, self.deadline = Phase.LEAVING, now + wait_s

    def _wait_for_exits(self, now: float) -> None:
        """Wait for what has not exited: all workers have said goodbye."""
        if self._exits is None and self.phase in (Phase.RUNNING, Phase.LEAVING):
            self._exits = Exits(self.graces, now)
            self.phase, self.deadline = Phase.LEAVING, now

    def _runs(self, one: Runs, now: float) -> list[Action]:
        """Wait on for a scheduler that starts on a busy host, and judge what has not exited.

        Workers are judged first, since servers and scheduler matter to nobody then.
        """
        if self.phase is Phase.STARTING and one.member == _SCHEDULER:
            self._start_clock.note(one.cpu_s, now, one.is_ready)
            self.deadline = now + max(0.0, self.graces.start_s - self._start_clock.counted_s(now))
        if self._exits is None or self.phase is not Phase.LEAVING:
            return []
        self._exits.note(one, one.member in self._stopped, now)
        workers = self._workers()
        why = {member: self._exits.why_overdue(member) for member in workers or self.alive}
        if not all(why.values()) or (self._unfinished and not workers):  # a worker whose host is slow to say so
            return []
        if not workers:
            warnings = [ShowLine(f"{member} is terminated: {reason}") for member, reason in why.items()]
            return [*warnings, *self._terminate(now)]
        self._fail(workers[0], 1, why[workers[0]], now)
        return self._terminate(now)

    def _fail(self, member: ProcessName, code: int, reason: str, now: float) -> None:
        if self.phase in _GOING_WELL:
            self.failure = Failure(member, code, reason, now - self._began)
            self.aftermath |= {one: end for one, end in self._in_question.items() if one != member}
            self._in_question.clear()
            self.phase, self.deadline = Phase.FAILING, now + self.graces.survivors_s

    def _add_to_failure(self, member: ProcessName, code: int, how: str, now: float) -> None:
        """Note one more end. Who ends only because of another may do so before that other's process is gone."""
        first = self.failure
        if first is not None and first.member == member:  # it was named before it ended
            self.failure = replace(first, code=code or first.code, reason=describe(code, first.reason))
        elif not self._is_named and first is not None and first.code == PEER_FAILED and code not in (0, PEER_FAILED):
            self.aftermath = {first.member: first.code, **self.aftermath}
            self.failure = Failure(member, code, how, now - self._began)
        else:
            self.aftermath[member] = code

    def _interrupted(self, signum: int, now: float) -> list[Action]:
        if self.phase in (Phase.INTERRUPTED, Phase.TERMINATING, Phase.KILLING):
            return self._kill(now)
        if self.phase is Phase.FAILING:
            return self._terminate(now)
        self._signum = signum
        self.phase, self.deadline = Phase.INTERRUPTED, now + self.graces.interrupt_s
        warning = ShowLine(f"{signal.Signals(signum).name}: ending the job; a second signal kills it")
        workers = self._workers()
        if not workers:
            return [warning, *self._terminate(now)]
        return [warning, Signal(signal.SIGTERM if signum == signal.SIGPIPE else signum, workers)]

    def _late(self, now: float) -> list[Action]:
        match self.phase:
            case Phase.STARTING:
                reason = f"did not say within {self.graces.start_s:g} s where it listens"
                self._fail(self._started[0], 1, reason, now)
                self._is_named = True
                return self._terminate(now)
            case Phase.RUNNING if self._lacks_verdict():
                self._decide_question(now)
                return self._terminate_idle(now)
            case Phase.RUNNING if self._workers() and self._stopped.issuperset(self._workers()):
                reason = f"stopped (SIGSTOP), and the job has waited for it for {self.graces.leave_s:g} s"
                self._fail(self._workers()[0], 1, reason, now)
                return self._terminate(now)
            case Phase.RUNNING:
                self.deadline = None  # it goes on
                return []
            case Phase.LEAVING if self._exits is not None:
                self.deadline = now + LOOK_S
                line = self._exits.waiting({member: self._places[member] for member in self.alive}, now)
                return [*([ShowLine(line)] if line else []), Look(tuple(self.alive))]
            case Phase.LEAVING:
                warning = (
                    f"all workers are done but {self._names()} did not leave within {self.graces.leave_s:g} s"
                    if self._is_complete
                    else f"all workers have ended without joining the job; ending {self._names()}. If they should have "
                    "trained together, their store needs a type such as dist_sync; a command without one, -s 0"
                )
                return [ShowLine(warning), *self._terminate(now)]
            case Phase.FAILING | Phase.INTERRUPTED:
                self._suspect_scheduler()
                if not self._workers():
                    return self._terminate(now)
                interrupted = self.phase is Phase.INTERRUPTED
                grace_s = self.graces.interrupt_s if interrupted else self.graces.survivors_s
                warning = f"{self._names()} did not leave within {grace_s:g} s"
                return [ShowLine(warning), *self._terminate(now)]
            case Phase.TERMINATING:
                return self._kill(now)
            case _:
                return [ShowLine(f"{self._names()} cannot be killed (waiting in the kernel?)"), self._over()]

    def _suspect_scheduler(self) -> None:
        """Blame the scheduler if the others lost somebody and it, which knows whom, does not respond."""
        first = self.failure
        if first is None or self._is_named or _SCHEDULER not in self.alive or first.code > 128:
            return
        if first.code == PEER_FAILED or _SCHEDULER in self._stopped:
            self.aftermath = {first.member: first.code, **self.aftermath}
            self.failure = Failure(_SCHEDULER, 1, "the others lost it: it runs, but does not respond", first.after_s)
            self._is_named = True

    def _terminate(self, now: float) -> list[Action]:
        self.phase, self.deadline = Phase.TERMINATING, now + self.graces.terminate_s
        return [Signal(signal.SIGTERM, tuple(self._started))]

    def _kill(self, now: float) -> list[Action]:
        self.phase, self.deadline = Phase.KILLING, now + self.graces.kill_s
        return [Signal(signal.SIGKILL, tuple(self._started))]

    def _finish_if_empty(self) -> list[Action]:
        is_to_come = self.phase is Phase.LEAVING and bool(self._unfinished)  # a worker whose host is slow to say so
        return [] if self.alive or is_to_come or self.phase in (Phase.STARTING, Phase.RUNNING) else [self._over()]

    def _over(self) -> JobEnded:
        self.phase, self.deadline = Phase.OVER, None
        return JobEnded(self.code)

    def _workers(self) -> tuple[ProcessName, ...]:
        return tuple(member for member in self.alive if member.role == "worker")

    def _names(self) -> str:
        return ", ".join(str(member) for member in self.alive)
