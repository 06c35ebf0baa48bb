"""Silence that is a death, and silence that is not, under a simulated clock."""

from __future__ import annotations

import pytest

from paceline.config import Settings
from paceline.host.own_time import LONGEST_TURN_S, OwnTime
from paceline.membership import Action, Membership, Warn
from paceline.membership.liveness import GONE, Liveness
from paceline.membership.roster import MemberRecord
from paceline.wire import messages as m

JOB = Settings(job_id="j", num_workers=2, num_servers=1)
LIMIT_S, STALL_S = JOB.heartbeat_timeout_s, JOB.stall_timeout_s
SEATS = [("worker", 0), ("worker", 1), ("server", 0)]
TICK_S = 0.2


class Job:
    """A scheduler's machine whose members beat twice a second, but for those that are silent.

    Attributes:
        hosts: for each silent member, since when its host is silent; None: not known.
        states: for each silent or lost member, the letter of its process, as the scheduler sees it.
        cpu_share: of the time that passes, what the process of each of these uses.
    """

    def __init__(self, silent: set[tuple[str, int]], joined: int = 3) -> None:
        self.members = Membership(JOB, 0.0, lambda: b"token", 77, "scheduler's")
        self.now = 0.0
        self.silent = silent
        self.hosts: dict[tuple[str, int], float | None] = {}
        self.states: dict[tuple[str, int], str] = {}
        self.cpu_share = 0.0
        self.lines: list[str] = []
        self.seq = 1
        for role, rank in SEATS[:joined]:
            hello = m.Hello("j", role, rank, 0, "h", f"host of {role}s", 9 + rank, "", 2, 1)
            self.members.handle(f"{role}-{rank}".encode(), 1, hello, 0.0)

    def beat(self, role: str, rank: int, *seen: m.Sighting) -> m.News:
        self.seq += 1
        actions = self.members.handle(f"{role}-{rank}".encode(), self.seq, m.Heartbeat(0, list(seen)), self.now)
        self._note(actions)
        (news,) = [one.body for one in actions if not isinstance(one, Warn) and hasattr(one, "body")]
        assert isinstance(news, m.News)
        return news

    def _note(self, actions: list[Action]) -> None:
        self.lines += [one.text for one in actions if isinstance(one, Warn)]

    def run(self, seconds: float) -> str:
        """Let time pass; return the first death, as ``at 4.2: worker 1: reason``, or an empty text."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = round(self.now + TICK_S, 6)
            if self.members.complete and not self.members.deaths and round(self.now / TICK_S) % 2 == 0:
                for record in SEATS:
                    if record not in self.silent:
                        self.beat(*record)
            for peer in self.members.lifelines(self.now):
                since = self.hosts.get(SEATS[[f"{role}-{rank}".encode() for role, rank in SEATS].index(peer)], self.now)
                self.members.note_host(peer, None if since is None else self.now - since)
            for suspect in self.members.suspects(self.now):
                if (suspect.member.role, suspect.member.rank) in self.states:
                    state = self.states[suspect.member.role, suspect.member.rank]
                    self.members.note_state(suspect, state, self.cpu_share * self.now, self.now)
            self._note(self.members.tick(self.now))
            self.members.check()
            if self.members.deaths:
                death = self.members.deaths[0]
                return f"at {self.now:.1f}: {death.role} {death.rank}: {death.reason}"
        return ""


def test_silent_host_is_named_within_five_seconds_and_judged_after_thirty() -> None:
    job = Job({("worker", 1)})
    job.hosts["worker", 1] = 0.0
    assert job.run(LIMIT_S + TICK_S) == ""
    assert LIMIT_S + TICK_S < 5.0
    (line,) = job.lines
    assert line.startswith("worker 1 on h (pid 10): its host was not heard for 4.2 s; it counts as dead after 30 s (")
    assert [one.phase for one in job.members.status(job.now).states] == ["live", "live", "silent"]
    found = job.run(60)
    assert found.startswith("at 30.2: worker 1: its host was not heard for 30.2 s; if that is normal here, raise ")


def test_outage_of_twelve_seconds_ends_nothing() -> None:
    job = Job({("worker", 1)})
    job.hosts["worker", 1] = 0.0
    assert job.run(12.0) == ""
    job.silent, job.hosts = set(), {}
    assert job.run(60) == ""
    assert job.lines[1:] == ["worker 1 on h (pid 10) was heard again after 12.4 s"]
    assert {one.phase for one in job.members.status(job.now).states} == {"live"}


def test_silent_process_on_a_host_that_answers_is_warned_of_once_and_lives() -> None:
    job = Job({("worker", 1)})
    assert job.run(STALL_S) == ""
    (line,) = job.lines
    assert line.startswith("worker 1 on h (pid 10): it was not heard for 4.2 s although its host answers: its process ")
    assert "Python's lock; it counts as dead after 30 s (PACELINE_STALL_TIMEOUT_S)" in line
    job.beat("worker", 1)
    assert job.lines[1:] == ["worker 1 on h (pid 10) was heard again after 30.0 s"]
    job.silent = set()
    assert job.run(10) == ""
    assert len(job.lines) == 2


def test_stalled_process_is_dead_in_the_end() -> None:
    job = Job({("worker", 1)})
    found = job.run(60)
    assert found.startswith("at 30.2: worker 1: it was not heard for 30.2 s although its host answers: ")
    assert "PACELINE_STALL_TIMEOUT_S" in found


def test_host_of_which_nothing_is_known_is_no_proof() -> None:
    job = Job({("server", 0)})
    job.hosts["server", 0] = None
    assert job.run(60).startswith("at 30.2: server 0: it was not heard for 30.2 s: its process is stalled")


def test_stopped_process_is_named_as_stopped_where_the_scheduler_sees_it() -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1] = "T"
    found = job.run(60)
    assert "although its host answers: its process is stopped; it counts as dead after 30 s" in job.lines[0]
    assert found.startswith("at 30.2: worker 1: it was not heard for 30.2 s although its host answers: its process is ")
    assert "is stopped; if that is normal here, raise PACELINE_STALL_TIMEOUT_S" in found


@pytest.mark.parametrize("state", GONE)
def test_silent_process_that_does_not_exist_any_more_is_dead_at_once(state: str) -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1] = state
    assert job.run(60) == "at 2.2: worker 1: its process has ended, and did not leave the job before"


def test_process_that_was_stopped_for_a_moment_lives() -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1] = "T"
    assert job.run(3.0) == ""
    job.silent, job.states = set(), {}
    assert job.run(10) == ""
    assert job.lines == []


def test_process_in_a_debugger_is_never_dead() -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1] = "t"
    assert job.run(10 * STALL_S) == ""
    assert [line.rpartition(": ")[2] for line in job.lines] == ["a debugger holds its process"]
    del job.states["worker", 1]
    assert job.run(STALL_S - 2 * TICK_S) == "", "it has as long to be heard again after the debugger went"
    assert job.run(60).startswith("at 330.2: worker 1: it was not heard for 330.2 s")


def test_process_that_is_ready_to_run_is_judged_by_the_time_in_which_its_host_ran_it() -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1], job.cpu_share = "R", 0.05
    assert job.run(10 * STALL_S) == ""
    (line,) = job.lines
    assert "its process waits for a processor, or computes in a call that holds Python's lock" in line
    assert line.endswith("after 30 s (PACELINE_STALL_TIMEOUT_S), less the time in which it waits for a processor")
    job.states["worker", 1] = "S"
    found = job.run(60)
    assert found.startswith("at 313.0: worker 1: "), "its CPU time and the first 2 s count"


def test_stalled_process_whose_threads_wake_now_and_then_does_not_wait_for_a_processor() -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1] = "S"
    assert job.run(STALL_S) == ""
    job.states["worker", 1], job.cpu_share = "R", 1.0
    found = job.run(1)
    assert "although its host answers: its process is stalled, for instance in a call that holds Python's lock" in found


def test_process_that_computes_and_is_not_heard_is_dead_in_the_end() -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1], job.cpu_share = "R", 1.0
    assert job.run(60).startswith("at 30.2: worker 1: it was not heard for 30.2 s although its host answers: ")


def test_process_that_waited_for_a_processor_is_judged_anew_when_it_was_heard() -> None:
    job = Job({("worker", 1)})
    job.states["worker", 1] = "R"
    assert job.run(STALL_S) == ""
    job.beat("worker", 1)
    job.states["worker", 1] = "S"
    assert job.run(60).startswith("at 60.2: worker 1: ")


def test_members_of_its_host_tell_that_it_waits_for_a_processor() -> None:
    job = Job({("worker", 1)})
    while job.now < 2 * STALL_S:
        assert job.run(TICK_S) == ""
        job.beat("worker", 0, m.Sighting("worker", 1, "R", 0.01 * job.now))


def test_members_of_its_host_are_asked_for_the_state_of_a_silent_one() -> None:
    job = Job({("worker", 1)})
    job.run(2.4)
    assert job.beat("worker", 0).suspects == [m.SilentMember("worker", 1, 10)]
    assert job.beat("server", 0).suspects == [], "it is on another host"
    while not job.members.deaths and job.now < 60:
        job.run(TICK_S)
        job.beat("worker", 0, m.Sighting("worker", 1, "T"))
    assert job.members.deaths[0].reason.startswith(
        "it was not heard for 30.2 s although its host answers: its process "
    )
    assert "its process is stopped; " in job.members.deaths[0].reason


@pytest.mark.parametrize("witness", [("server", 0), ("worker", 1)])
def test_only_members_of_its_host_are_believed_about_a_process(witness: tuple[str, int]) -> None:
    job = Job({("worker", 0)})
    while job.now < LIMIT_S + 2:
        job.run(TICK_S)
        job.beat(*witness, m.Sighting("worker", 0, "X"), m.Sighting("worker", 9, "X"))
    assert bool(job.members.deaths) == (witness[0] == "worker")


def test_what_was_seen_long_ago_counts_no_more() -> None:
    job = Job({("worker", 1)})
    job.run(2.4)
    job.beat("worker", 0, m.Sighting("worker", 1, "D"))
    assert job.run(60).endswith(
        "in a call that holds Python's lock; if that is normal here, raise PACELINE_STALL_TIMEOUT_S"
    )


def test_silent_host_ends_the_wait_for_others_to_join() -> None:
    job = Job(set(), joined=2)
    assert job.run(20) == ""
    job.hosts["worker", 1] = job.now
    job.states["worker", 0] = "T"
    assert job.run(60).startswith("at 50.2: worker 1: its host was not heard for 30.2 s")
    assert job.lines[0].startswith("worker 1 on h (pid 10): its host was not heard for 4.2 s; ")


def test_member_that_connects_again_while_it_waits_for_others_to_join_is_no_death() -> None:
    job = Job(set(), joined=2)
    job.members.lost(b"worker-0", job.now)
    assert job.run(1.0) == ""
    assert job.members.heard(b"worker-0", job.now) == []  # its probe: it sends no heartbeats yet
    assert job.members.heard(b"a stranger", job.now) == []
    assert job.run(50.0) == ""


def test_further_connection_of_a_member_does_not_stand_for_its_lifeline() -> None:
    job = Job(set())
    job.members.handle(b"bulk", 1, m.Claim("worker", 1, b"token"), job.now)
    job.silent = {("worker", 1)}
    job.members.lost(b"worker-1", job.now)
    job.members.heard(b"bulk", job.now)
    assert job.run(20.0).startswith("at 5.2: worker 1: its connection closed 5.2 s ago")


# ---- closed connections ----------------------------------------------------------------------------------------------


def lost(state: str = "") -> Job:
    """Return a job in which the connection of worker 1 closed 2 s after the start."""
    job = Job(set())
    job.run(2.0)
    job.silent = {("worker", 1)}
    job.states = {("worker", 1): state} if state else {}
    job.members.lost(b"worker-1", job.now)
    return job


def test_closed_connection_of_which_nothing_else_is_known_has_its_grace() -> None:
    found = lost().run(60)
    assert found == "at 7.2: worker 1: its connection closed 5.2 s ago and it did not come back"


@pytest.mark.parametrize("state", GONE)
def test_closed_connection_of_a_process_that_has_ended_is_a_death_at_once(state: str) -> None:
    found = lost(state=state).run(60)
    assert found == "at 3.6: worker 1: its process has ended, and did not leave the job before"


def test_closed_connection_of_a_process_that_runs_is_waited_for_as_any_silence() -> None:
    job = lost(state="S")
    found = job.run(60)
    assert found.startswith("at 32.2: worker 1: its connection closed 30.2 s ago and it did not come back; if that is ")
    assert job.lines[0].endswith("it did not come back; it counts as dead after 30 s (PACELINE_STALL_TIMEOUT_S)")


def test_closed_connection_of_a_process_that_a_launcher_watches_over_is_waited_for() -> None:
    job = lost()
    job.members.is_supervised = True
    assert job.run(12.0) == ""
    job.members.ended("worker", 1, 0, job.now)
    assert job.run(60).startswith("at 14.2: worker 1: its process ended with exit code 0 and did not leave")


def test_process_that_connects_again_from_a_busy_host_is_forgiven() -> None:
    job = lost()
    assert job.run(4.0) == ""
    job.silent = set()
    assert job.run(60) == ""


# ---- the judge's own time --------------------------------------------------------------------------------------------


def test_time_in_which_the_scheduler_did_not_run_is_no_silence() -> None:
    job = Job(set())
    job.run(2.0)
    job.silent, job.now = set(SEATS), job.now + 50.0  # it wakes up before the threads that read
    job.hosts = dict.fromkeys(SEATS, 2.0)
    assert job.run(LIMIT_S - LONGEST_TURN_S - 2 * TICK_S) == ""
    job.silent = set()
    assert job.run(10) == ""
    assert job.lines == []


def test_closed_connection_is_given_its_grace_after_a_pause_of_the_scheduler() -> None:
    job = Job(set())
    job.run(2.0)
    job.members.lost(b"worker-1", job.now)
    job.silent, job.now = {("worker", 1)}, job.now + 20.0
    assert job.run(TICK_S) == ""
    job.silent = set()
    assert job.run(10) == ""


def test_sighting_by_a_member_of_a_large_job_counts_until_its_next_heartbeats() -> None:
    """Neighbours see a process, whose connection has closed, with every second of their heartbeats."""
    settings = JOB.replace(num_workers=100)
    liveness = Liveness(settings, 0.0)
    record = MemberRecord(m.Member("worker", 1, 0, "h", "h", 9, "", b""), b"worker-1", 0.0, 1)
    record.closed_since = 0.0
    for turn in range(1, 15):
        liveness.note_state(record, "S", 0.0, 2 * turn * settings.beat_interval_s)
        before_next = 2 * (turn + 1) * settings.beat_interval_s
        assert liveness.why_dead(record, True, before_next) == ""
    assert liveness.why_dead(record, True, before_next + 1.0).startswith("its connection closed")


def test_own_time_of_a_slow_process_still_counts() -> None:
    own = OwnTime(5.0)
    assert own.lost_s(5.2) == 0.0
    assert own.lost_s(5.2 + LONGEST_TURN_S) == pytest.approx(0.0)
    assert own.lost_s(16.2) == pytest.approx(11.0 - 2 * LONGEST_TURN_S)


def test_members_learn_who_the_scheduler_is() -> None:
    members = Membership(JOB.replace(num_workers=1), 0.0, lambda: b"token", 77, "its host")
    members.handle(b"w", 1, m.Hello("j", "worker", 0, 0, "h", "x", 9, "", 1, 1), 0.0)
    actions = members.handle(b"s", 1, m.Hello("j", "server", 0, 0, "h", "x", 9, "", 1, 1), 0.0)
    welcomes = [one.body for one in actions if not isinstance(one, Warn) and hasattr(one, "body")]
    assert [(one.scheduler_pid, one.scheduler_host_id) for one in welcomes if isinstance(one, m.Welcome)] == [
        (77, "its host")
    ] * 2
