from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.host.exitcodes import PEER_FAILED, WORKER_LOST, describe_code
from paceline.launch import Graces, ProcessName
from paceline.launch.supervise.events import (
    Action,
    Alone,
    Complete,
    Event,
    Exited,
    Interrupted,
    JobEnded,
    Left,
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
    Unheard,
)
from paceline.launch.supervise.exits import LOOK_S, SAY_S
from paceline.launch.supervise.lifecycle import UNJOINED_CPU_S, UNJOINED_S, JobLifecycle, Phase

SCHEDULER, SERVER, W0, W1 = (
    ProcessName("scheduler", 0),
    ProcessName("server", 0),
    ProcessName("worker", 0),
    ProcessName("worker", 1),
)
ALL = (SCHEDULER, SERVER, W0, W1)
GRACES = Graces(start_s=60, survivors_s=6, idle_s=300, leave_s=10, terminate_s=5, kill_s=5)


class World:
    """Plays the processes and the clock for a lifecycle."""

    def __init__(
        self,
        members: tuple[ProcessName, ...] = ALL,
        unstartable: ProcessName | None = None,
        may_go_on: bool = False,
        must_join: bool = False,
    ) -> None:
        self.now = 0.0
        self.unstartable = unstartable
        self.finished: list[int] = []
        self.signals: list[tuple[int, tuple[ProcessName, ...]]] = []
        self.warnings: list[str] = []
        self.busy: set[ProcessName] = set()
        """These use CPU time."""
        self.cycle = JobLifecycle(members, GRACES, self.now, may_go_on, must_join)
        self._do(self.cycle.begin())

    def tell(self, event: Event) -> None:
        self._do(self.cycle.handle(event, self.now))
        self.cycle.check()

    def wait(self) -> None:
        assert self.cycle.deadline is not None
        self.now = self.cycle.deadline
        self.tell(Tick())

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartProcesses(members):
                    self._start(members)
                case Signal(signum, members):
                    self.signals.append((signum, members))
                case Look(members):
                    for member in members:
                        self.tell(Runs(member, self.now if member in self.busy else 0.0))
                case ShowLine(text):
                    self.warnings.append(text)
                case JobEnded(code):
                    self.finished.append(code)

    def _start(self, members: tuple[ProcessName, ...]) -> None:
        for member in members:
            if member == self.unstartable:
                self.tell(NotStarted(member, "cannot be run: too many processes"))
                return
            self.tell(Started(member, f"pid {100 + member.rank}"))

    def pass_s(self, seconds: float) -> None:
        """Let time pass, tick by tick; without a deadline at once."""
        until = self.now + seconds
        while self.cycle.deadline is not None and self.cycle.deadline <= until and not self.finished:
            self.wait()
        self.now = until


@pytest.fixture
def world() -> World:
    made = World()
    made.tell(Ready())
    made.tell(Complete())
    return made


def test_others_wait_for_the_scheduler() -> None:
    world = World()
    assert list(world.cycle.alive) == [SCHEDULER]
    world.tell(Ready())
    assert list(world.cycle.alive) == list(ALL)
    assert world.cycle.deadline is None


def test_job_without_scheduler_starts_at_once() -> None:
    world = World((W0, W1))
    assert list(world.cycle.alive) == [W0, W1]
    world.tell(Exited(W1, 0))
    world.tell(Exited(W0, 0))
    assert world.finished == [0]


def test_scheduler_that_starts_on_a_busy_host_is_waited_for() -> None:
    world = World()
    for number in range(1, 100):
        world.now = 2.0 * number
        world.tell(Runs(SCHEDULER, 0.1 * number))
        world.tell(Tick())
    assert world.cycle.phase is Phase.STARTING
    world.tell(Ready())
    world.tell(Complete())
    assert world.cycle.phase is Phase.RUNNING


def test_scheduler_that_computes_and_does_not_listen_has_the_start_timeout() -> None:
    world = World()
    world.now = 59.0
    world.tell(Runs(SCHEDULER, 58.0))
    world.wait()
    assert world.now == pytest.approx(61.0)
    assert world.cycle.blame.cause is not None


def test_silent_scheduler_is_terminated_at_the_deadline() -> None:
    world = World()
    world.wait()
    assert world.now == 60
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.reason == "did not say within 60 s where it listens"
    assert world.signals == [(signal.SIGTERM, (SCHEDULER,))]
    world.tell(Exited(SCHEDULER, 143))
    assert world.finished == [1]


@pytest.mark.parametrize(("code", "expected"), [(7, 7), (0, 1)])
def test_scheduler_that_leaves_before_it_is_ready_fails_the_job(code: int, expected: int) -> None:
    world = World()
    world.tell(Exited(SCHEDULER, code))
    assert world.finished == [expected]


def test_job_is_done_when_all_workers_are_and_the_others_left(world: World) -> None:
    for member in (W1, W0, SERVER):
        world.tell(Exited(member, 0))
        assert world.finished == []
    world.tell(Exited(SCHEDULER, 0))
    assert world.finished == [0]
    assert world.signals == []


def test_roles_that_no_worker_has_joined_are_terminated_with_a_warning_and_do_not_fail_the_job(world: World) -> None:
    for member in (W0, W1):
        world.tell(Exited(member, 0))
    world.wait()
    assert world.now == 10
    assert world.warnings == ["all workers are done but scheduler, server 0 did not leave within 10 s"]
    assert [signum for signum, _ in world.signals] == [signal.SIGTERM]
    for member in (SERVER, SCHEDULER):
        world.tell(Exited(member, 143))
    assert world.finished == [0]


@pytest.mark.parametrize("early", [True, False])
def test_exits_that_take_long_are_waited_for_and_the_job_ends_with_zero(world: World, early: bool) -> None:
    world.busy.update(ALL)
    if early:
        world.tell(Over())
        world.pass_s(200)
    for member in (SCHEDULER, W0):
        world.tell(Exited(member, 0))
    world.pass_s(2000)
    for member in (W1, SERVER):
        world.tell(Exited(member, 0))
    assert world.finished == [0]
    assert world.signals == []


def test_processes_that_are_waited_for_are_named_again_and_again(world: World) -> None:
    world.tell(Exited(W0, 0))
    world.tell(Over())
    world.tell(Exited(SCHEDULER, 0))
    world.pass_s(SAY_S + LOOK_S)
    said = "all workers have left the job; waiting 30 s for the exit of server 0 (pid 100), worker 1 (pid 101)"
    assert world.warnings == [said]
    world.pass_s(SAY_S)
    assert world.warnings == [said, said.replace("30 s", "60 s")]


def test_worker_that_hangs_in_its_exit_fails_the_job_and_is_named(world: World) -> None:
    world.tell(Exited(W0, 0))
    world.tell(Over())
    for member in (SERVER, SCHEDULER):
        world.tell(Exited(member, 0))
    world.pass_s(GRACES.idle_s - LOOK_S)
    assert world.cycle.blame.cause is None
    world.pass_s(2 * LOOK_S)
    assert world.cycle.blame.cause is not None
    assert (world.cycle.blame.cause.member, world.cycle.code) == (W1, 1)
    assert world.cycle.blame.cause.reason.startswith("did not exit, and has used no CPU time for 300 s")
    assert world.signals == [(signal.SIGTERM, ALL)]


def test_worker_that_hangs_does_not_cut_off_another_that_exits_slowly(world: World) -> None:
    world.busy.add(W0)
    world.tell(Over())
    world.pass_s(2 * GRACES.idle_s)
    assert world.signals == []
    world.tell(Exited(W0, 0))
    world.pass_s(LOOK_S)
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == W1


def test_server_that_hangs_in_its_exit_is_terminated_with_a_warning_and_does_not_fail_the_job(world: World) -> None:
    world.tell(Over())
    for member in (W0, W1, SCHEDULER):
        world.tell(Exited(member, 0))
    world.pass_s(GRACES.idle_s + 2 * LOOK_S)
    assert world.warnings[-1].startswith("server 0 is terminated: did not exit, and has used no CPU time for 300 s")
    world.tell(Exited(SERVER, 143))
    assert world.finished == [0]


def test_machine_that_did_not_run_for_an_hour_is_no_hang(world: World) -> None:
    world.tell(Over())
    world.wait()
    world.now += 3600.0
    world.tell(Tick())
    assert world.cycle.blame.cause is None


@pytest.mark.parametrize("code", [3, 137])
def test_exit_code_of_a_worker_counts_after_its_goodbye(world: World, code: int) -> None:
    world.tell(Over())
    for member in (W0, SERVER, SCHEDULER):
        world.tell(Exited(member, 0))
    world.tell(Exited(W1, code))
    assert world.finished == [code]
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == W1


def test_server_that_fails_after_the_last_worker_fails_the_job(world: World) -> None:
    for member, code in ((W0, 0), (W1, 0), (SCHEDULER, 0), (SERVER, 9)):
        world.tell(Exited(member, code))
    assert world.finished == [9]


def test_first_failure_gives_the_code_and_the_others_time_to_leave(world: World) -> None:
    world.now = 3.0
    world.tell(Exited(W1, 137))
    assert world.signals == []
    for member, code in ((SERVER, 2), (W0, 1), (SCHEDULER, 3)):
        world.tell(Exited(member, code))
    assert world.finished == [137]
    failure = world.cycle.blame.cause
    assert failure is not None
    assert (failure.member, failure.reason, failure.after_s) == (W1, "killed by SIGKILL (exit code 137)", 3.0)
    assert list(world.cycle.blame.aftermath.items()) == [(SERVER, 2), (W0, 1)]


@pytest.mark.parametrize("named", [True, False])
def test_roles_are_ended_when_the_last_worker_has_failed(world: World, named: bool) -> None:
    world.tell(Exited(W0, 2))
    assert world.signals == []
    world.tell(Exited(W1, 2))
    assert world.signals == []
    if named:
        world.tell(Lost(W0, "its process ended: exit code 2"))
    else:
        world.wait()
        assert world.now == GRACES.survivors_s
    assert world.signals == [(signal.SIGTERM, ALL)]
    assert world.warnings == []
    for member in (SERVER, SCHEDULER):
        world.tell(Exited(member, 143))
    assert (world.finished, world.cycle.blame.aftermath) == ([2], {W1: 2})


@pytest.mark.parametrize("victim_code", [PEER_FAILED, 1])
def test_victim_that_ends_first_is_not_blamed(world: World, victim_code: int) -> None:
    world.tell(Exited(W0, victim_code))
    world.tell(Lost(W1, "it raised ArithmeticError: NaN"))
    world.tell(Lost(W0, "its process ended: exit code 1"))
    world.tell(Exited(W1, 5))
    for member in (SERVER, SCHEDULER):
        world.tell(Exited(member, PEER_FAILED))
    assert world.finished == [5]
    failure = world.cycle.blame.cause
    assert failure is not None
    assert (failure.member, failure.reason) == (W1, "exit code 5: it raised ArithmeticError: NaN")
    assert list(world.cycle.blame.aftermath) == [W0]


def test_who_is_named_and_stays_fails_the_job_with_1(world: World) -> None:
    world.tell(Lost(W1, "it was not heard for 15.0 s"))
    for member in (W0, SERVER, SCHEDULER):
        world.tell(Exited(member, PEER_FAILED))
    world.wait()
    world.tell(Exited(W1, 143))
    assert world.finished == [1]
    assert world.cycle.blame.cause is not None
    assert (world.cycle.blame.cause.member, world.cycle.blame.cause.reason) == (W1, "it was not heard for 15.0 s")


def test_exit_code_and_what_the_scheduler_says_of_it_are_said_once(world: World) -> None:
    world.tell(Exited(W1, 137))
    world.tell(Lost(W1, "its process ended: killed by SIGKILL (exit code 137)"))
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.reason == "killed by SIGKILL (exit code 137)"


def test_scheduler_that_names_nobody_and_runs_is_to_blame(world: World) -> None:
    for member in (W0, W1, SERVER):
        world.tell(Exited(member, PEER_FAILED))
    world.wait()
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == SCHEDULER
    assert "does not respond" in world.cycle.blame.cause.reason
    world.tell(Exited(SCHEDULER, 143))
    assert world.finished == [1]


def test_stopped_scheduler_is_to_blame_whatever_the_exit_code_of_the_others(world: World) -> None:
    world.tell(Stopped(frozenset({SCHEDULER})))
    for member, code in ((W0, 1), (W1, 1), (SERVER, PEER_FAILED)):
        world.tell(Exited(member, code))
    world.wait()
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == SCHEDULER
    assert list(world.cycle.blame.aftermath) == [W0, W1, SERVER]


def test_job_whose_last_processes_are_stopped_ends(world: World) -> None:
    world.tell(Exited(W0, 0))
    world.tell(Stopped(frozenset({W1})))
    world.tell(Exited(SERVER, 0))
    world.tell(Exited(SCHEDULER, 0))
    world.pass_s(GRACES.leave_s + 2 * LOOK_S)
    assert world.cycle.blame.cause is not None
    assert (world.cycle.blame.cause.member, world.cycle.code) == (W1, 1)
    assert "stopped (SIGSTOP), and the job has waited for its exit for 10 s" in world.cycle.blame.cause.reason
    world.tell(Exited(W1, 143))
    assert world.finished == [1]


def test_stopped_worker_is_named_and_not_the_scheduler_that_left_meanwhile(world: World) -> None:
    world.tell(Exited(W0, 0))
    world.tell(Stopped(frozenset({W1})))
    world.tell(Exited(SCHEDULER, 0))
    world.pass_s(GRACES.leave_s + 2 * LOOK_S)
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == W1


def test_who_was_stopped_for_a_moment_goes_on() -> None:
    world = World((W0, W1))
    world.tell(Stopped(frozenset({W0, W1})))
    world.tell(Stopped(frozenset()))
    world.wait()
    assert world.cycle.deadline is None
    for member in (W0, W1):
        world.tell(Exited(member, 0))
    assert world.finished == [0]


def test_workers_may_take_longer_after_an_interrupt_than_after_a_failure() -> None:
    graces = Graces(survivors_s=6, interrupt_s=50)
    cycle = JobLifecycle((W0,), graces, 0.0)
    cycle.begin()
    cycle.handle(Started(W0), 0.0)
    cycle.handle(Interrupted(signal.SIGTERM), 1.0)
    assert cycle.handle(Tick(), 50.9) == []
    assert ShowLine("worker 0 did not leave within 50 s") in cycle.handle(Tick(), 51.0)


def test_job_whose_command_does_not_exist_has_the_code_of_a_shell(world: World) -> None:
    world.tell(NotStarted(W0, "the command 'x' is not on the PATH", 127))
    assert world.cycle.code == 127


def test_what_is_said_after_an_interrupt_blames_nobody(world: World) -> None:
    world.tell(Interrupted(signal.SIGINT))
    world.tell(Lost(W0, "it raised KeyboardInterrupt: "))
    assert world.cycle.blame.cause is None


def test_roles_may_say_what_happened_when_workers_only_saw_that_a_peer_failed(world: World) -> None:
    for member in (W0, W1):
        world.tell(Exited(member, PEER_FAILED))
    assert world.signals == []
    world.tell(Exited(SERVER, 9))
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == SERVER


def test_survivors_are_terminated_then_killed_then_given_up(world: World) -> None:
    world.tell(Exited(SERVER, 1))
    world.wait()
    assert world.now == 6
    world.wait()
    assert world.now == 11
    assert world.signals == [(signal.SIGTERM, ALL), (signal.SIGKILL, ALL)]  # SERVER may have left something behind
    world.tell(Unheard(frozenset({W1})))
    world.wait()
    assert world.finished == [1]
    assert "scheduler, worker 0 cannot be killed" in world.warnings[-2]
    assert "worker 1 may run on: no word from there" in world.warnings[-1]


def test_process_that_ends_by_our_signal_is_not_blamed(world: World) -> None:
    world.tell(Exited(W1, 5))
    world.wait()
    for member in (SCHEDULER, SERVER, W0):
        world.tell(Exited(member, 143))
    assert world.finished == [5]
    assert world.cycle.blame.aftermath == {}


def test_whether_a_server_left_too_early_is_for_the_scheduler_to_say(world: World) -> None:
    world.tell(Exited(SERVER, 0))
    assert (world.cycle.phase, world.cycle.deadline) == (Phase.RUNNING, None)
    world.tell(Lost(SERVER, "it left the job with exit code 0, before the workers did"))
    assert world.cycle.blame.cause is not None
    assert (world.cycle.blame.cause.member, world.cycle.code) == (SERVER, 1)


def test_who_ends_because_of_another_is_not_the_one_to_blame(world: World) -> None:
    for member, code in ((SERVER, PEER_FAILED), (SCHEDULER, PEER_FAILED), (W1, 9), (W0, 1)):
        world.tell(Exited(member, code))
    assert world.finished == [9]
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == W1
    assert list(world.cycle.blame.aftermath) == [SERVER, SCHEDULER, W0]


def test_when_nobody_else_is_to_blame_the_first_to_end_is_named(world: World) -> None:
    world.tell(Exited(SCHEDULER, PEER_FAILED))
    world.tell(Exited(SERVER, PEER_FAILED))
    world.tell(Exited(W0, 0))
    world.wait()  # worker 1 hangs
    world.tell(Exited(W1, 143))
    assert world.finished == [PEER_FAILED]
    assert world.cycle.blame.cause is not None
    assert world.cycle.blame.cause.member == SCHEDULER


def test_process_that_cannot_be_started_fails_the_job() -> None:
    world = World(unstartable=W0)
    world.tell(Ready())
    assert list(world.cycle.alive) == [SCHEDULER, SERVER]
    world.wait()
    for member in (SCHEDULER, SERVER):
        world.tell(Exited(member, 143))
    assert world.finished == [1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_reaches_the_workers_first(world: World, signum: int) -> None:
    world.tell(Interrupted(signum))
    assert world.signals == [(signum, (W0, W1))]
    assert signal.Signals(signum).name in world.warnings[0]
    world.tell(Exited(W0, 1))
    world.tell(Exited(W1, 0))
    assert world.signals[1:] == [(signal.SIGTERM, ALL)]
    world.tell(Exited(SERVER, 143))
    world.tell(Exited(SCHEDULER, 143))
    assert world.finished == [128 + signum]
    assert world.cycle.blame.cause is None


def test_second_interrupt_kills(world: World) -> None:
    world.tell(Interrupted(signal.SIGINT))
    world.tell(Interrupted(signal.SIGINT))
    assert world.signals[-1] == (signal.SIGKILL, ALL)


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM])
def test_terminal_that_closes_leaves_workers_the_time_to_save(world: World, first: int) -> None:
    world.tell(Interrupted(first))
    world.tell(Interrupted(signal.SIGHUP))
    world.tell(Interrupted(signal.SIGPIPE))
    assert [signum for signum, _ in world.signals] == [signal.SIGTERM if first == signal.SIGPIPE else first]
    world.tell(Interrupted(signal.SIGINT))
    assert world.signals[-1] == (signal.SIGKILL, ALL)


def test_interrupt_after_a_failure_ends_the_wait_for_survivors(world: World) -> None:
    world.tell(Exited(W0, 4))
    world.tell(Interrupted(signal.SIGINT))
    assert world.signals == [(signal.SIGTERM, ALL)]
    assert world.cycle.code == 4


def test_interrupt_before_the_workers_run_terminates_the_scheduler() -> None:
    world = World()
    world.tell(Interrupted(signal.SIGTERM))
    assert world.signals == [(signal.SIGTERM, (SCHEDULER,))]
    world.tell(Ready())
    assert list(world.cycle.alive) == [SCHEDULER]
    world.tell(Exited(SCHEDULER, 143))
    assert world.finished == [143]


def test_reader_that_went_away_ends_the_job_by_sigterm(world: World) -> None:
    world.tell(Interrupted(signal.SIGPIPE))
    assert world.signals == [(signal.SIGTERM, (W0, W1))]
    assert world.cycle.code == 141


def surviving() -> World:
    made = World(may_go_on=True)
    made.tell(Ready())
    return made


def test_others_go_on_when_the_scheduler_says_so() -> None:
    world = surviving()
    world.tell(Exited(W0, 137))
    assert world.cycle.phase is Phase.RUNNING
    world.tell(Lost(W0, "its process ended: killed by SIGKILL (exit code 137)", goes_on=True))
    assert world.cycle.blame.cause is None
    assert world.cycle.phase is Phase.RUNNING
    assert world.cycle.deadline is None
    for member in (W1, SERVER):
        world.tell(Exited(member, 0))
    assert world.finished == []
    world.tell(Exited(SCHEDULER, WORKER_LOST))
    assert world.finished == [WORKER_LOST]
    assert [(str(one.member), one.code) for one in world.cycle.blame.survived.values()] == [("worker 0", 137)]


def test_worker_that_has_left_under_notice_may_end_in_any_way() -> None:
    world = surviving()
    world.tell(Left(W0))
    world.tell(Exited(W0, 137))
    assert world.cycle.phase is Phase.RUNNING
    for member in (W1, SERVER, SCHEDULER):
        world.tell(Exited(member, 0))
    assert world.finished == [0]


def test_process_of_a_worker_may_end_before_the_news_that_it_has_left() -> None:
    world = surviving()
    world.tell(Exited(W1, 0))
    world.tell(Exited(W0, 0))
    world.tell(Left(W0))
    assert world.cycle.phase is Phase.LEAVING


def test_scheduler_may_see_a_death_before_the_process_has_ended() -> None:
    world = surviving()
    world.tell(Lost(W0, "its connection closed", goes_on=True))
    world.tell(Exited(W1, 0))
    assert world.cycle.phase is Phase.RUNNING
    world.tell(Exited(W0, 139))
    assert world.cycle.phase is Phase.LEAVING
    assert world.cycle.blame.survived[W0].code == 139


def test_death_is_a_failure_if_the_scheduler_says_so_or_nothing() -> None:
    for verdict in (Lost(W0, "its process ended: exit code 3"), None):
        world = surviving()
        world.tell(Exited(W0, 3))
        if verdict is None:
            world.tell(Exited(W1, 0))
        world.tell(verdict) if verdict else world.wait()
        assert world.cycle.blame.cause is not None
        assert (world.cycle.blame.cause.member, world.cycle.blame.cause.code) == (W0, 3)
        assert world.now == (0 if verdict else GRACES.leave_s)


def test_death_is_a_failure_if_the_scheduler_ends_without_a_word() -> None:
    world = surviving()
    world.tell(Exited(W0, 3))
    world.tell(Exited(W1, 4))
    world.tell(Exited(SCHEDULER, 0))
    assert world.cycle.blame.cause is not None
    assert (world.cycle.blame.cause.member, world.cycle.blame.cause.code) == (W0, 3)
    assert world.cycle.blame.aftermath == {W1: 4, SCHEDULER: 0}


def test_verdict_of_a_slow_scheduler_is_waited_for_while_others_run() -> None:
    world = surviving()
    world.tell(Exited(W0, 3))
    world.pass_s(1000)
    assert world.cycle.blame.cause is None
    world.tell(Lost(W0, "its process ended: exit code 3", goes_on=True))
    for member in (W1, SERVER):
        world.tell(Exited(member, 0))
    world.tell(Exited(SCHEDULER, WORKER_LOST))
    assert world.finished == [WORKER_LOST]


def test_verdict_of_a_stopped_scheduler_is_not_waited_for() -> None:
    world = surviving()
    world.tell(Exited(W0, 3))
    world.tell(Stopped(frozenset({SCHEDULER})))
    world.wait()
    assert world.now == GRACES.leave_s
    assert world.cycle.blame.cause is not None


def test_failure_of_the_last_worker_is_explained_within_the_deadline_however_long_survivors_may_take() -> None:
    cycle = JobLifecycle(ALL, Graces(survivors_s=600), 0.0)
    for event in [Ready(), *map(Started, ALL), Exited(W0, 3), Exited(W1, 0)]:
        cycle.handle(event, 0.0)
    assert cycle.deadline == Graces().leave_s


def test_worker_that_lost_another_one_fails_at_once() -> None:
    world = surviving()
    world.tell(Exited(W0, PEER_FAILED))
    assert world.cycle.phase is Phase.FAILING


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.sampled_from([0, 0, 0, 1, 137]))), st.booleans())
def test_every_job_ends_once_and_only_a_good_one_with_zero(steps: list[tuple[int, int, int]], killable: bool) -> None:
    world = World()
    spoilt, done = False, set[ProcessName]()
    for kind, index, code in steps:
        if kind == 0:
            spoilt |= not world.finished
            world.tell(Interrupted(signal.SIGINT))
        elif kind == 1 and world.cycle.deadline is not None:
            world.wait()
        elif kind == 2:
            world.tell(Ready())
        elif kind == 3:
            spoilt |= world.cycle.phase in (Phase.RUNNING, Phase.LEAVING)
            world.tell(Lost(ALL[index], "it was not heard for 15 s"))
        elif world.cycle.alive and not world.finished:
            member = list(world.cycle.alive)[index % len(world.cycle.alive)]
            done |= {member} if code == 0 else set()
            world.tell(Exited(member, code))
    for _ in range(10):
        if world.cycle.phase is Phase.RUNNING and world.cycle.deadline is None:
            member = next(member for member in world.cycle.alive if member.role == "worker")
            done.add(member)
            world.tell(Exited(member, 0))
        elif world.cycle.phase is Phase.KILLING and killable:
            for member in list(world.cycle.alive):
                world.tell(Exited(member, 137))
        elif not world.finished:
            world.pass_s(GRACES.idle_s + 2 * LOOK_S)
    assert len(world.finished) == 1
    if world.finished == [0]:
        assert {W0, W1} <= done
        assert not spoilt


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exit code 3"), (139, "killed by SIGSEGV (exit code 139)"), (255, "exit code 255")],
)
def test_exit_code_is_put_into_words(code: int, text: str) -> None:
    assert describe_code(code) == text


@pytest.mark.parametrize("said", ["", "workers 0-1 train alone: the store is local"])
def test_servers_of_workers_that_never_joined_are_ended_soon_and_the_line_names_the_way_out(said: str) -> None:
    world = World()
    world.tell(Ready())
    if said:
        world.tell(Alone(said))
    world.tell(Exited(W0, 0))
    world.tell(Exited(W1, 0))
    world.wait()
    assert world.now == UNJOINED_S
    assert world.signals == [(signal.SIGTERM, ALL)]
    [line] = world.warnings
    assert line.startswith("all workers have ended without joining the job; ending scheduler, server 0")
    assert line.endswith(f": {said}" if said else "-s 0")
    for member in (SCHEDULER, SERVER):
        world.tell(Exited(member, 143))
    assert world.finished == [0]


def test_worker_whose_host_is_slow_to_say_that_it_runs_outlives_idle_servers() -> None:
    cycle = JobLifecycle(ALL, GRACES, 0.0)
    cycle.begin()
    cycle.handle(Started(SCHEDULER), 0.0)
    cycle.handle(Ready(), 0.0)
    cycle.handle(Over(), 0.0)
    cycle.handle(Runs(SCHEDULER, 0.0), 0.0)
    for now in range(2 * int(GRACES.idle_s)):
        assert cycle.handle(Runs(SCHEDULER, 0.0), float(now)) == []
    assert cycle.phase is Phase.LEAVING


@pytest.mark.parametrize("joined", [False, True])
def test_job_of_ddp_fails_if_all_workers_end_and_none_has_joined(joined: bool) -> None:
    world = World(must_join=True)
    world.tell(Ready())
    if joined:
        world.tell(Complete())
    world.tell(Exited(W0, 0))
    world.tell(Exited(W1, 0))
    world.wait()
    assert world.now == GRACES.leave_s
    assert world.cycle.code == (0 if joined else 1)
    cause = world.cycle.blame.cause
    assert (cause is None) == joined
    if cause is not None:
        assert "ended, and no worker has opened the backend paceline of --ddp" in cause.reason
        assert "Either the script calls no init_process_group" in cause.reason


def test_worker_of_ddp_that_works_without_joining_is_named_once() -> None:
    world = World(must_join=True)
    world.tell(Ready())
    world.tell(Runs(SERVER, 2 * UNJOINED_CPU_S))
    world.tell(Runs(W0, UNJOINED_CPU_S - 1))
    assert world.warnings == []
    world.tell(Runs(W0, UNJOINED_CPU_S))
    world.tell(Runs(W1, UNJOINED_CPU_S))
    [line] = world.warnings
    assert line.startswith("worker 0 has used 20 s of CPU time, and not opened the backend paceline of --ddp. Either ")


@pytest.mark.parametrize("must_join", [False, True])
def test_worker_of_ddp_that_the_others_wait_for_in_vain_gets_a_hint(must_join: bool) -> None:
    world = World(must_join=must_join)
    world.tell(Ready())
    world.tell(Lost(W1, "worker 1 did not join within 60 s"))
    cause = world.cycle.blame.cause
    assert cause is not None
    assert ("TORCH_DEVICE_BACKEND_AUTOLOAD" in cause.reason) == must_join
