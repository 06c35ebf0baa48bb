"""Processes that start on a busy host are waited for; those that do not move are named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from paceline.config import Settings
from paceline.membership import Action, Answer, Membership, Warn
from paceline.wire import messages as m

LIMIT_S, REPORT_S, TICK_S = 60.0, 2.0, 0.2
JOB = Settings(job_id="j", num_workers=2, num_servers=1, start_timeout_s=LIMIT_S)
JOINED = (("worker", 0), ("server", 0))


class Start:
    """A start in which worker 1 takes its time; the others have joined.

    Args:
        share: of the time that passes, which worker 1 gets as CPU time; None: no launcher tells.
        is_ready: it would use more if the host gave it more.
        joined: those that have joined.
    """

    def __init__(self, share: float | None, is_ready: bool = False, joined: Sequence[tuple[str, int]] = JOINED) -> None:
        self.members = Membership(JOB, 0.0, lambda: b"token")
        self.members.is_supervised = share is not None
        self.share, self.cpu_s, self.is_ready = share, 0.0, is_ready
        self.now = 0.0
        self.actions: list[Action] = []
        for role, rank in joined:
            self.members.handle(f"{role}-{rank}".encode(), 1, self.hello(role, rank), 0.0)

    def hello(self, role: str, rank: int) -> m.Hello:
        return m.Hello("j", role, rank, 0, "h", "x", 9, "", 2, 1)

    def run(self, seconds: float) -> str:
        """Let time pass; return the cause of the end with its time, or an empty text."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = round(self.now + TICK_S, 6)
            if self.share is not None and round(self.now / TICK_S) % round(REPORT_S / TICK_S) == 0:
                self.cpu_s += self.share * REPORT_S
                self.members.note_cpu(("worker", 1), self.cpu_s, self.now, self.is_ready)
            self.actions += self.members.tick(self.now)
            if self.members.cause is not None:
                return f"at {self.now:.0f}: {self.members.cause.role} {self.members.cause.rank}"
        return ""

    @property
    def lines(self) -> list[str]:
        return [one.text for one in self.actions if isinstance(one, Warn)]


@pytest.mark.parametrize(
    "share",
    [None, 0.0, 0.001, 1.0, 4.0],
    ids=["nobody tells", "sleeps", "polls", "computes", "computes on four cores"],
)
def test_process_that_is_not_held_up_is_named_after_the_start_timeout(share: float | None) -> None:
    assert Start(share).run(300) in ("at 60: worker 1", "at 62: worker 1")


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_process_on_a_busy_host_is_waited_for_as_long_as_it_gets_cpu_time(share: float) -> None:
    job = Start(share)
    assert job.run(LIMIT_S / share - 1) == ""
    answers = job.members.handle(b"worker-1", 1, job.hello("worker", 1), job.now)
    assert [one.body for one in answers if isinstance(one, Answer) and not isinstance(one.body, m.Welcome)] == []
    assert job.members.complete


def test_process_that_is_waited_for_is_named_now_and_then() -> None:
    job = Start(0.05)
    job.run(55)
    assert job.lines == []
    job.run(95)
    assert len(job.lines) == 4
    assert job.lines[0].startswith("worker 1 (3.0 s of CPU time) did not join within 60 s, and still starts on a busy ")


def test_members_hear_that_the_wait_goes_on_before_their_own_deadline() -> None:
    job = Start(0.05)
    heard = [0.0]
    while job.now < 4 * LIMIT_S:
        count = len(job.actions)
        job.run(TICK_S)
        news = [one for one in job.actions[count:] if isinstance(one, Answer) and isinstance(one.body, m.News)]
        assert {one.peer for one in news} in (set(), {b"worker-0", b"server-0"})
        heard += [job.now] * bool(news)
    assert max(later - sooner for sooner, later in itertools.pairwise(heard)) < LIMIT_S


def test_process_that_stops_to_move_is_named_in_the_end() -> None:
    job = Start(0.05)
    assert job.run(100) == ""
    job.share = 0.0
    assert job.run(300) in ("at 155: worker 1", "at 156: worker 1")


def test_only_those_whose_time_is_over_are_named() -> None:
    job = Start(0.05, joined=[("server", 0)])  # worker 0 never started
    assert job.run(300) == "at 60: worker 0"
    assert job.members.deaths[0].reason.startswith("worker 0 did not join within 60 s; ")


def test_time_in_which_the_scheduler_did_not_run_does_not_count() -> None:
    job = Start(None)
    job.run(10)
    job.now += 500
    assert job.run(45) == ""
    assert job.run(20).endswith("worker 1")


@pytest.mark.parametrize("share", [0.0, 0.001])
def test_process_that_waits_for_a_processor_is_waited_for_however_little_it_gets(share: float) -> None:
    start = Start(share, is_ready=True)
    assert start.run(10 * LIMIT_S) == ""
    assert "still starts on a busy host" in start.lines[0]
