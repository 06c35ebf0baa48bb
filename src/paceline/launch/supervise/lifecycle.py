"""When a job starts, fails and ends: a machine without processes, pipes or clock.

| phase | what runs |
|---|---|
| ``STARTING`` | the scheduler alone |
| ``RUNNING`` | everything |
| ``LEAVING`` | processes that have not exited: all workers have left the job |
| ``FAILING`` | the others, which report their observations |
| ``INTERRUPTED`` | everything; the workers got the signal |
| ``TERMINATING`` | processes that have not exited; all got SIGTERM |
| ``KILLING`` | processes that have not exited; all got SIGKILL |
| ``OVER`` | nothing |

| from | to | when |
|---|---|---|
| ``STARTING`` | ``RUNNING`` | the scheduler listens, or the job has none |
| ``RUNNING`` | ``LEAVING`` | all workers have said goodbye (``Over``), or exited with 0, or died and others went on |
| ``STARTING``, ``RUNNING``, ``LEAVING`` | ``FAILING`` | an exit code is not 0, no start, or ``Lost`` |
| ``STARTING`` | ``FAILING`` | the scheduler exits with 0, or ``start_s`` has counted for it (``StartClock``) |
| ``RUNNING`` | ``FAILING`` | all that still runs has been stopped (SIGSTOP) for ``leave_s`` |
| ``LEAVING`` | ``FAILING`` | a worker hangs in its exit, or no worker has joined a job that ``must_join`` |
| ``STARTING``, ``RUNNING``, ``LEAVING`` | ``INTERRUPTED`` | a signal |
| ``LEAVING`` | ``TERMINATING`` | no worker is left, and servers and scheduler hang; or no ``Over`` in time |
| ``FAILING`` | ``TERMINATING`` | ``survivors_s`` has passed |
| ``INTERRUPTED`` | ``TERMINATING`` | ``interrupt_s`` has passed |
| ``FAILING``, ``INTERRUPTED`` | ``TERMINATING`` | no worker is left, and the cause is known, or ``leave_s`` later |
| ``FAILING`` | ``TERMINATING`` | a signal, or the scheduler did not start, or the worker hangs |
| ``INTERRUPTED``, ``TERMINATING`` | ``KILLING`` | a second signal of those that users send: SIGINT, SIGTERM |
| ``TERMINATING`` | ``KILLING`` | ``terminate_s`` has passed |
| ``KILLING`` | ``OVER`` | ``kill_s`` has passed |
| ``LEAVING``, ``FAILING``, ``INTERRUPTED``, ``TERMINATING``, ``KILLING`` | ``OVER`` | no process is left |

**A good end.** When all workers have said goodbye, the job has succeeded if the exit codes say so, however long the
exits take. The scheduler knows of the goodbyes (``Over``); its own exit code of 0 says the same. From then on only a
process that hangs is ended (:mod:`paceline.launch.supervise.exits`): a worker's hang is a failure, one of servers or
scheduler is not: they are not needed. That a server left too early is for the scheduler to say (``Lost``). Where no
worker has joined, the scheduler says nothing when they exit, and ends nothing: then ``UNJOINED_S`` counts.

**Blame.** :mod:`paceline.launch.supervise.blame` judges which failure is the first cause, and whether a worker's death
is one. It says so where the exit of others, or the scheduler, may still tell more; then this machine waits.

Limits (:class:`~paceline.launch.job_spec.Graces`). Every phase but ``RUNNING`` has one, so no job hangs while it ends.
Processes are left only if the kernel cannot end them within ``kill_s``.
``survivors_s`` must exceed ``LAST_WORDS_S``, after which survivors learn of a death, plus the time in
which they report it and exit. ``survivors_s`` and ``leave_s`` must exceed the time in which the scheduler names a
process after it is told its exit code: 0.2 s on an idle machine.

**Notice.** A worker that has left under notice (``Left``) is done with, in whatever way its process ends.

**Deaths that others survive.** The scheduler may decide that the others go on (``--on-worker-death``). Its verdict on a
worker's death is waited for: as long as other workers run, which notice a scheduler that does not respond;
``leave_s`` after that, or if the scheduler is stopped. If the others go on, the job's exit code is ``WORKER_LOST`` when
it ends well; unless another process is started (:mod:`paceline.launch.supervise.replacing`) and has joined.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence

from paceline.host.start_clock import StartClock
from paceline.launch.job_spec import Graces
from paceline.launch.plan import SCHEDULER, ProcessName
from paceline.launch.supervise import events as e
from paceline.launch.supervise.blame import Blame
from paceline.launch.supervise.exits import LOOK_S, Exits
from paceline.launch.supervise.replacing import Replacing


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

#: Why a worker of ``--ddp`` may not join.
_WHY_UNJOINED = (
    "Either the script calls no init_process_group, or import torch did not load paceline: is it installed for the "
    "Python that the script runs with, and does nothing set TORCH_DEVICE_BACKEND_AUTOLOAD to 0?"
)

#: What is wrong where workers of ``--ddp`` end with 0 and none has joined.
_UNJOINED = (
    "ended, and no worker has opened the backend paceline of --ddp: each trained alone, or over another backend. "
    f"{_WHY_UNJOINED}"
)

#: CPU time after which a worker of ``--ddp`` that has not joined is named: several times that of ``import torch``.
UNJOINED_CPU_S = 20.0

#: What is wrong where other workers have ended without joining, and nobody has said more.
_HOW_TO_JOIN = (
    ". If they should have trained together, their store needs a type such as dist_sync; a command without one, -s 0"
)

_GOING_WELL = frozenset({Phase.STARTING, Phase.RUNNING, Phase.LEAVING})


class JobLifecycle:
    """The state of one job that starts now, its members in that order; times are seconds on one clock.

    ``may_go_on``: the job may go on when a worker dies; its scheduler decides. ``must_join``: a job whose workers all
    end without joining has failed (``--ddp``). ``replace``: how often a worker that dies is started again.
    """

    def __init__(
        self,
        members: Sequence[ProcessName],
        graces: Graces,
        now: float,
        may_go_on: bool = False,
        must_join: bool = False,
        replace: int = 0,
    ) -> None:
        self.members = tuple(members)
        self.graces = graces
        self.phase = Phase.STARTING
        self.deadline: float | None = None
        """When a :class:`Tick` is due, if one is."""
        self.blame = Blame(now, SCHEDULER in self.members, may_go_on)
        self._must_join = must_join
        self.replacing = Replacing(replace)
        self._exits: Exits | None = None
        """Exits of the processes that are left when all workers have said goodbye."""
        self._places: dict[ProcessName, str] = {}
        self.alive: dict[ProcessName, None] = {}
        """The processes that run, in the order of starting."""
        self._started: list[ProcessName] = []
        self._unfinished = {member for member in members if member.role == "worker"}
        self._signum = 0
        self._began, self._start_clock = now, StartClock(now)
        self._is_complete = False
        """All members have joined."""
        self._has_warned = False
        """A worker of ``--ddp`` was named that has not joined."""
        self._alone = ""
        """The scheduler's word on workers that train without having joined."""
        self._stopped: frozenset[ProcessName] = frozenset()
        self._left: set[ProcessName] = set()
        """Workers that have left under notice: their exit codes do not matter."""
        self._unheard: frozenset[ProcessName] = frozenset()

    def begin(self) -> list[e.Action]:
        """Return the first actions: the scheduler alone if there is one, because the others need its address."""
        scheduler = tuple(member for member in self.members if member.role == "scheduler")
        if not scheduler:
            self.phase = Phase.RUNNING
            return [e.StartProcesses(self.members)]
        self.deadline = self._began + self.graces.start_s
        return [e.StartProcesses(scheduler)]

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """Handle an event and return what to do, in order."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case e.Started(member, place):
                self.alive[member], self._places[member] = None, place
                self._started += [member] if member not in self._started else []
                return []
            case e.Ready():
                return self._ready()
            case e.NotStarted(member, reason) if member in self.replacing.outside:
                self._lose_worker(member, now)
                return [e.ShowLine(f"{member} could not be started again: {reason}")]
            case e.NotStarted(member, reason, code):
                self._fail(member, reason, now, code)
                return self._finish_if_empty()
            case e.Stopped(members):
                self._stopped = members
                self._watch_stopped(now)
                return []
            case e.Unheard(members):
                self._unheard = members
                return []
            case e.Lost(member, reason, True):
                return self._survived(member, reason, now)
            case e.Lost(member, reason):
                is_unjoined = self._must_join and "did not join" in reason
                self._fail(member, f"{reason}. {_WHY_UNJOINED}" if is_unjoined else reason, now)
                return self._terminate_idle(now)
            case e.TakenOver(member):
                self.replacing.joined(member)
                self.blame.note_joined(member)
                return []
            case e.Left(member):
                self._note_left(member, now)
                return []
            case e.Exited():
                return self._exited(event, now)
            case e.Complete():
                self._is_complete = True
                return []
            case e.Alone(text):
                self._alone = text
                return []
            case e.Over():
                self._wait_for_exits(now)
                outside = tuple(member for member in self.alive if member in self.replacing.outside)
                return [e.Signal(signal.SIGKILL, outside)] if outside else []
            case e.StatusSaid():
                return []
            case e.Runs():
                return self._runs(event, now)
            case e.Interrupted(signum):
                return self._interrupted(signum, now)
            case e.Tick():
                late = self._late(now) if self.deadline is not None and now >= self.deadline else []
                return late or self._start_again(now)

    @property
    def next_at(self) -> float | None:
        """When a :class:`Tick` is due, for the deadline of a phase or for a worker that is started again."""
        times = [self.deadline, self.replacing.deadline if self.phase is Phase.RUNNING else None]
        return min((one for one in times if one is not None), default=None)

    def _start_again(self, now: float) -> list[e.Action]:
        due = self.replacing.take_due(now) if self.phase is Phase.RUNNING else ()
        return [
            *(e.ShowLine(f"{member} is started again") for member in due),
            *([e.StartProcesses(due)] if due else []),
        ]

    @property
    def code(self) -> int:
        """The exit code of the job as things stand."""
        return 128 + self._signum if self._signum and not self.blame.has_failed else self.blame.code

    def check(self) -> None:
        """Assert the invariants."""
        assert set(self.alive) <= set(self._started) <= set(self.members)
        assert (self.deadline is None) <= (self.phase in (Phase.RUNNING, Phase.OVER))
        assert not self.blame.has_failed or self.phase not in _GOING_WELL
        assert self.phase is not Phase.LEAVING or self._exits is not None or not self._unfinished

    def _ready(self) -> list[e.Action]:
        if self.phase is not Phase.STARTING:
            return []
        self.phase, self.deadline = Phase.RUNNING, None
        return [e.StartProcesses(tuple(member for member in self.members if member.role != "scheduler"))]

    def _note_left(self, member: ProcessName, now: float) -> None:
        self._left.add(member)
        if member not in self.alive:
            self._finish_worker(member, now)

    def _exited(self, one: e.Exited, now: float) -> list[e.Action]:
        self.alive.pop(one.member, None)
        if one.member in self._left or (one.member in self.replacing.outside and self.phase is not Phase.RUNNING):
            one = e.Exited(one.member, 0)
        if self.phase in _GOING_WELL or self.phase is Phase.FAILING:
            self.blame.note_exit(one.member, one.code, now, one.detail)
            self._follow_blame(now)
        if self.phase is Phase.STARTING:
            self._fail(one.member, "exited before it reported its address", now)
        elif self.phase in _GOING_WELL:
            self._go_on_after(one, now)
        self._watch_stopped(now)
        return self._finish_if_empty() or self._terminate_idle(now)

    def _go_on_after(self, one: e.Exited, now: float) -> None:
        """Go on after an exit that is no failure, as far as is known."""
        if one.member == SCHEDULER:
            self._wait_for_exits(now)
        elif one.member.role == "worker" and one.code == 0:
            self._finish_worker(one.member, now)
        elif one.member in self.blame.survived:
            self._lose_worker(one.member, now)

    def _fail(self, member: ProcessName, reason: str, now: float, code: int = 1) -> None:
        """Take in which process failed first, unless the job ends already."""
        if self.phase in _GOING_WELL or self.blame.has_failed:
            self.blame.name(member, reason, now, code)
            self._follow_blame(now)

    def _follow_blame(self, now: float) -> None:
        if self.blame.has_failed and self.phase in _GOING_WELL:
            self.phase, self.deadline = Phase.FAILING, now + self.graces.survivors_s

    def _watch_stopped(self, now: float) -> None:
        """Set a deadline where nobody else would notice: all that runs is stopped, or a verdict does not come."""
        is_still = self._lacks_verdict() or self._stopped.issuperset(self.alive)
        if self.phase is Phase.RUNNING and self.deadline is None and is_still:
            self.deadline = now + self.graces.leave_s

    def _lacks_verdict(self) -> bool:
        """Tell whether a verdict is to come, and no worker runs or the scheduler is stopped."""
        return self.blame.awaits_verdict and (not self._workers() or SCHEDULER in self._stopped)

    def _terminate_idle(self, now: float) -> list[e.Action]:
        """End servers and scheduler if they have nobody left to work for, and can tell no more about why."""
        if self._workers() or self.phase not in (Phase.FAILING, Phase.INTERRUPTED) or not self.alive:
            return []
        if self.phase is Phase.INTERRUPTED or self.blame.is_settled:
            return self._terminate(now)
        latest = now + self.graces.leave_s
        self.deadline = min(self.deadline or latest, latest)
        return []

    def _survived(self, member: ProcessName, reason: str, now: float) -> list[e.Action]:
        death = self.blame.note_survived(member, reason, now)
        if death is None:
            return []
        line = e.ShowLine(f"{member} died, the others go on: {death.reason}")
        if member not in self.alive:
            self._lose_worker(member, now)
        elif self.replacing.may_start(member):  # nobody hears it any more, and its rank is another's
            return [line, e.Signal(signal.SIGKILL, (member,))]
        return [line]

    def _lose_worker(self, member: ProcessName, now: float) -> None:
        if self.phase is not Phase.RUNNING or not self.replacing.note_death(member, now):
            self._finish_worker(member, now)

    def _finish_worker(self, member: ProcessName, now: float) -> None:
        self._unfinished.discard(member)
        if not self._unfinished and self.phase is Phase.RUNNING:
            is_sure = self._is_complete or self._must_join
            wait_s = self.graces.leave_s if is_sure else min(self.graces.leave_s, UNJOINED_S)
            self.phase, self.deadline = Phase.LEAVING, now + wait_s

    def _wait_for_exits(self, now: float) -> None:
        """Wait for the remaining processes: all workers have said goodbye."""
        if self._exits is None and self.phase in (Phase.RUNNING, Phase.LEAVING):
            self._exits = Exits(self.graces, now)
            self.blame.note_goodbyes()
            self._unfinished.difference_update(self.replacing.stop(), self.replacing.outside)
            self.phase, self.deadline = Phase.LEAVING, now

    def _runs(self, one: e.Runs, now: float) -> list[e.Action]:
        """Wait on for a scheduler that starts on a busy host, and judge the processes left.

        Workers are judged first, since servers and scheduler matter to nobody then.
        """
        if self.phase is Phase.STARTING and one.member == SCHEDULER:
            self._start_clock.note(one.cpu_s, now, one.is_ready)
            self.deadline = now + max(0.0, self.graces.start_s - self._start_clock.counted_s(now))
        if self._must_join and self.phase is Phase.RUNNING and not self._is_complete:
            return self._watch_unjoined(one)
        if self._exits is None or self.phase is not Phase.LEAVING:
            return []
        self._exits.note(one, one.member in self._stopped, now)
        workers = self._workers()
        why = {member: self._exits.why_overdue(member) for member in workers or self.alive}
        if not all(why.values()) or (self._unfinished and not workers):  # a worker whose host is slow to say so
            return []
        if not workers:
            warnings = [e.ShowLine(f"{member} is terminated: {reason}") for member, reason in why.items()]
            return [*warnings, *self._terminate(now)]
        self._fail(workers[0], why[workers[0]], now)
        return self._terminate(now)

    def _watch_unjoined(self, one: e.Runs) -> list[e.Action]:
        """Warn of a worker of ``--ddp`` that works on without the others."""
        if self._has_warned or one.member.role != "worker" or one.cpu_s < UNJOINED_CPU_S:
            return []
        self._has_warned = True
        known = f"{one.member} has used {one.cpu_s:.0f} s of CPU time, and not opened the backend paceline of --ddp"
        return [e.ShowLine(f"{known}. {_WHY_UNJOINED}")]

    def _interrupted(self, signum: int, now: float) -> list[e.Action]:
        if self.phase in (Phase.INTERRUPTED, Phase.TERMINATING, Phase.KILLING):
            is_gone = signum in (signal.SIGHUP, signal.SIGPIPE)  # a terminal that closes, and its shell, send several
            return [] if is_gone else self._kill(now)
        if self.phase is Phase.FAILING:
            return self._terminate(now)
        self._signum = signum
        self.phase, self.deadline = Phase.INTERRUPTED, now + self.graces.interrupt_s
        warning = e.ShowLine(f"{signal.Signals(signum).name}: ending the job; a second signal kills it")
        workers = self._workers()
        if not workers:
            return [warning, *self._terminate(now)]
        return [warning, e.Signal(signal.SIGTERM if signum == signal.SIGPIPE else signum, workers)]

    def _late(self, now: float) -> list[e.Action]:
        match self.phase:
            case Phase.STARTING:
                reason = f"did not say within {self.graces.start_s:g} s where it listens"
                self._fail(self._started[0], reason, now)
                return self._terminate(now)
            case Phase.RUNNING if self._lacks_verdict():
                self.blame.stop_waiting(now)
                self._follow_blame(now)
                return self._terminate_idle(now)
            case Phase.RUNNING if self._workers() and self._stopped.issuperset(self._workers()):
                reason = f"stopped (SIGSTOP), and the job has waited for it for {self.graces.leave_s:g} s"
                self._fail(self._workers()[0], reason, now)
                return self._terminate(now)
            case Phase.RUNNING:
                self.deadline = None  # it goes on
                return []
            case Phase.LEAVING if self._exits is not None:
                self.deadline = now + LOOK_S
                line = self._exits.waiting({member: self._places[member] for member in self.alive}, now)
                return [*([e.ShowLine(line)] if line else []), e.Look(tuple(self.alive))]
            case Phase.LEAVING if self._must_join and not self._is_complete:
                self._fail(next(one for one in self._started if one.role == "worker"), _UNJOINED, now)
                return self._terminate(now)
            case Phase.LEAVING:
                warning = (
                    f"all workers are done but {self._names()} did not leave within {self.graces.leave_s:g} s"
                    if self._is_complete
                    else f"all workers have ended without joining the job; ending {self._names()}"
                    f"{f': {self._alone}' if self._alone else _HOW_TO_JOIN}"
                )
                return [e.ShowLine(warning), *self._terminate(now)]
            case Phase.FAILING | Phase.INTERRUPTED:
                self.blame.suspect_scheduler(SCHEDULER in self._stopped, now)
                if not self._workers():
                    return self._terminate(now)
                interrupted = self.phase is Phase.INTERRUPTED
                grace_s = self.graces.interrupt_s if interrupted else self.graces.survivors_s
                warning = f"{self._names()} did not leave within {grace_s:g} s"
                return [e.ShowLine(warning), *self._terminate(now)]
            case Phase.TERMINATING:
                return self._kill(now)
            case _:
                return [*self._left_over(), self._over()]

    def _terminate(self, now: float) -> list[e.Action]:
        self.phase, self.deadline = Phase.TERMINATING, now + self.graces.terminate_s
        return [e.Signal(signal.SIGTERM, tuple(self._started))]

    def _kill(self, now: float) -> list[e.Action]:
        self.phase, self.deadline = Phase.KILLING, now + self.graces.kill_s
        return [e.Signal(signal.SIGKILL, tuple(self._started))]

    def _left_over(self) -> list[e.Action]:
        """Say why processes have not ended after SIGKILL."""
        stuck = [one for one in self.alive if one not in self._unheard]
        gone = [one for one in self.alive if one in self._unheard]
        reasons = (
            (stuck, "cannot be killed (waiting in the kernel?)"),
            (gone, "may run on: no word from there; an agent that misses the launcher ends what it has started"),
        )
        return [e.ShowLine(f"{', '.join(map(str, names))} {reason}") for names, reason in reasons if names]

    def _finish_if_empty(self) -> list[e.Action]:
        is_to_come = self.phase is Phase.LEAVING and bool(self._unfinished)  # a worker whose host is slow to say so
        return [] if self.alive or is_to_come or self.phase in (Phase.STARTING, Phase.RUNNING) else [self._over()]

    def _over(self) -> e.JobEnded:
        self.phase, self.deadline = Phase.OVER, None
        return e.JobEnded(self.code)

    def _workers(self) -> tuple[ProcessName, ...]:
        return tuple(member for member in self.alive if member.role == "worker")

    def _names(self) -> str:
        return ", ".join(str(member) for member in self.alive)
