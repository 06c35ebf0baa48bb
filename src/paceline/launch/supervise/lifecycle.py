"""When a job starts, fails and ends: a machine without processes, pipes or clock.

| phase | what runs |
|---|---|
| ``STARTING`` | the scheduler alone |
| ``RUNNING`` | everything |
| ``LEAVING`` | servers and scheduler, which exit |
| ``FAILING`` | the others, which report what they saw |
| ``INTERRUPTED`` | everything; the workers got the signal |
| ``TERMINATING`` | what has not exited yet; all got SIGTERM |
| ``KILLING`` | what has not exited yet; all got SIGKILL |
| ``OVER`` | nothing |

| from | to | when |
|---|---|---|
| ``STARTING`` | ``RUNNING`` | the scheduler listens, or the job has none |
| ``RUNNING`` | ``LEAVING`` | all workers have exited with 0 |
| ``STARTING``, ``RUNNING``, ``LEAVING`` | ``FAILING`` | an exit code is not 0, or a process cannot be started |
| ``STARTING`` | ``FAILING`` | the scheduler exits with 0, or ``start_s`` has passed |
| ``RUNNING`` | ``FAILING`` | a server or the scheduler left before the others, ``leave_s`` ago, and workers still run |
| ``STARTING``, ``RUNNING``, ``LEAVING`` | ``INTERRUPTED`` | a signal |
| ``LEAVING`` | ``TERMINATING`` | ``leave_s`` has passed |
| ``FAILING``, ``INTERRUPTED`` | ``TERMINATING`` | ``survivors_s`` has passed |
| ``FAILING``, ``INTERRUPTED`` | ``TERMINATING`` | no worker is left, and no exit to come can explain more |
| ``FAILING`` | ``TERMINATING`` | a signal, or the scheduler did not start |
| ``INTERRUPTED``, ``TERMINATING`` | ``KILLING`` | a second signal |
| ``TERMINATING`` | ``KILLING`` | ``terminate_s`` has passed |
| ``KILLING`` | ``OVER`` | ``kill_s`` has passed |
| ``LEAVING``, ``FAILING``, ``INTERRUPTED``, ``TERMINATING``, ``KILLING`` | ``OVER`` | no process is left |

The first failure decides the exit code. It is replaced once, by an exit that explains it: a process that exits with
``PEER_FAILED`` did so because of another one, whose own exit may be seen later.

Timeouts (:class:`~paceline.launch.spec.Graces`). Every phase but ``RUNNING`` has one, so no job hangs while it ends.
``survivors_s`` must exceed the setting ``disconnect_grace_s``, after which survivors learn of a death, plus the time in
which they report it and exit. ``leave_s`` must exceed the time that servers need to exit after the last worker.

A job ends with processes left only if the kernel cannot end them within ``kill_s``.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.exitcodes import PEER_FAILED
from paceline.launch.plan import Member
from paceline.launch.spec import Graces
from paceline.launch.supervise.events import (
    Action,
    Event,
    Exited,
    Finish,
    Interrupted,
    NotStarted,
    Ready,
    Signal,
    Start,
    Started,
    Tick,
    Warn,
)


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


_GOING_WELL = frozenset({Phase.STARTING, Phase.RUNNING, Phase.LEAVING})


@dataclass(frozen=True)
class Failure:
    """What went wrong first: who, the job's exit code, what happened, and how long after the start."""

    member: Member
    code: int
    reason: str
    after_s: float


class Lifecycle:
    """The state of one job.

    Args:
        members: every process of the plan, in the order they start.
        graces: how long each phase may take.
        now: the time of the start, in seconds; later times are on the same clock.
    """

    def __init__(self, members: Sequence[Member], graces: Graces, now: float) -> None:
        self.members = tuple(members)
        self.graces = graces
        self.phase = Phase.STARTING
        self.deadline: float | None = None
        """When a :class:`Tick` is due, if one is."""
        self.failure: Failure | None = None
        self.aftermath: dict[Member, int] = {}
        """Exit codes of the other processes that exited by themselves, in order."""
        self.alive: dict[Member, None] = {}
        """The processes that run, in the order of starting."""
        self._started: list[Member] = []
        self._unfinished = {member for member in members if member.role == "worker"}
        self._departed: list[Member] = []
        self._signum = 0
        self._began = now

    def begin(self) -> list[Action]:
        """Return the first actions: the scheduler alone if there is one, because the others need its address."""
        scheduler = tuple(member for member in self.members if member.role == "scheduler")
        if not scheduler:
            self.phase = Phase.RUNNING
            return [Start(self.members)]
        self.deadline = self._began + self.graces.start_s
        return [Start(scheduler)]

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event and return what to do, in order."""
        if self.phase is Phase.OVER:
            return []
        match event:
            case Started(member):
                self.alive[member] = None
                self._started.append(member)
                return []
            case Ready():
                return self._ready()
            case NotStarted(member, reason):
                self._fail(member, 1, reason, now)
                return self._finish_if_empty()
            case Exited(member, code):
                return self._exited(member, code, now)
            case Interrupted(signum):
                return self._interrupted(signum, now)
            case Tick():
                return self._late(now) if self.deadline is not None and now >= self.deadline else []

    @property
    def code(self) -> int:
        """The exit code of the job as things stand."""
        if self.failure is not None:
            return self.failure.code
        return 128 + self._signum if self._signum else 0

    def check(self) -> None:
        """Assert what is always true."""
        assert set(self.alive) <= set(self._started) <= set(self.members)
        assert (self.deadline is None) <= (self.phase in (Phase.RUNNING, Phase.OVER))
        assert (self.failure is None) or self.phase not in _GOING_WELL
        assert self.phase is not Phase.LEAVING or not self._unfinished

    def _ready(self) -> list[Action]:
        if self.phase is not Phase.STARTING:
            return []
        self.phase, self.deadline = Phase.RUNNING, None
        return [Start(tuple(member for member in self.members if member.role != "scheduler"))]

    def _exited(self, member: Member, code: int, now: float) -> list[Action]:
        self.alive.pop(member, None)
        if self.phase is Phase.FAILING:
            self._add_to_failure(member, code, now)
        elif self.phase in _GOING_WELL:
            self._judge(member, code, now)
        actions = self._finish_if_empty()
        if not actions and not self._workers() and self._is_explained():
            return self._terminate(now)  # servers and scheduler have nobody left to work for
        return actions

    def _is_explained(self) -> bool:
        """Tell whether the job is ending and nobody's end can tell more about why."""
        if self.phase is Phase.FAILING:
            return self.failure is not None and self.failure.code != PEER_FAILED
        return self.phase is Phase.INTERRUPTED

    def _judge(self, member: Member, code: int, now: float) -> None:
        if code != 0:
            self._fail(member, code, describe_code(code), now)
        elif self.phase is Phase.STARTING:
            self._fail(member, 1, "exited before it reported its address", now)
        elif member.role == "worker":
            self._unfinished.discard(member)
            if not self._unfinished:
                self.phase, self.deadline = Phase.LEAVING, now + self.graces.leave_s
        elif self._unfinished:
            self._departed.append(member)
            self.deadline = self._departure_deadline(now)

    def _departure_deadline(self, now: float) -> float | None:
        """Return until when workers may go on without a server or scheduler that left with exit code 0.

        Servers and scheduler all leave only when every worker has said that it needs them no more; then the workers
        have no deadline. If one leaves while others stay, it left too early.
        """
        if len(self.alive) == len(self._workers()):
            return None
        return now + self.graces.leave_s if self.deadline is None else self.deadline

    def _fail(self, member: Member, code: int, reason: str, now: float) -> None:
        if self.phase in _GOING_WELL:
            self.failure = Failure(member, code, reason, now - self._began)
            self.phase, self.deadline = Phase.FAILING, now + self.graces.survivors_s

    def _add_to_failure(self, member: Member, code: int, now: float) -> None:
        """Note one more end. Who ends only because of another may do so before that other's process is gone."""
        first = self.failure
        if first is not None and first.code == PEER_FAILED and code not in (0, PEER_FAILED):
            self.aftermath = {first.member: first.code, **self.aftermath}
            self.failure = Failure(member, code, describe_code(code), now - self._began)
        else:
            self.aftermath[member] = code

    def _interrupted(self, signum: int, now: float) -> list[Action]:
        if self.phase in (Phase.INTERRUPTED, Phase.TERMINATING, Phase.KILLING):
            return self._kill(now)
        if self.phase is Phase.FAILING:
            return self._terminate(now)
        self._signum = signum
        self.phase, self.deadline = Phase.INTERRUPTED, now + self.graces.survivors_s
        warning = Warn(f"{signal.Signals(signum).name}: ending the job; a second signal kills it")
        workers = self._workers()
        if not workers:
            return [warning, *self._terminate(now)]
        return [warning, Signal(signal.SIGTERM if signum == signal.SIGPIPE else signum, workers)]

    def _late(self, now: float) -> list[Action]:
        match self.phase:
            case Phase.STARTING:
                reason = f"did not say within {self.graces.start_s:g} s where it listens"
                self._fail(self._started[0], 1, reason, now)
                return self._terminate(now)
            case Phase.RUNNING:
                waiting = ", ".join(str(member) for member in self._workers())
                reason = f"left {self.graces.leave_s:g} s ago, while {waiting} still ran"
                self._fail(self._departed[0], 1, reason, now)
                return self._finish_if_empty()
            case Phase.LEAVING:
                warning = f"all workers are done but {self._names()} did not leave within {self.graces.leave_s:g} s"
                return [Warn(warning), *self._terminate(now)]
            case Phase.FAILING | Phase.INTERRUPTED:
                warning = f"{self._names()} did not leave within {self.graces.survivors_s:g} s"
                return [Warn(warning), *self._terminate(now)]
            case Phase.TERMINATING:
                return self._kill(now)
            case _:
                return [Warn(f"{self._names()} cannot be killed (waiting in the kernel?)"), self._over()]

    def _terminate(self, now: float) -> list[Action]:
        self.phase, self.deadline = Phase.TERMINATING, now + self.graces.terminate_s
        return [Signal(signal.SIGTERM, tuple(self._started))]

    def _kill(self, now: float) -> list[Action]:
        self.phase, self.deadline = Phase.KILLING, now + self.graces.kill_s
        return [Signal(signal.SIGKILL, tuple(self._started))]

    def _finish_if_empty(self) -> list[Action]:
        return [] if self.alive or self.phase in (Phase.STARTING, Phase.RUNNING) else [self._over()]

    def _over(self) -> Finish:
        self.phase, self.deadline = Phase.OVER, None
        return Finish(self.code)

    def _workers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.alive if member.role == "worker")

    def _names(self) -> str:
        return ", ".join(str(member) for member in self.alive)


def describe_code(code: int) -> str:
    """Say in words how a process ended."""
    if code <= 128:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
    except ValueError:
        return f"exit code {code}"
