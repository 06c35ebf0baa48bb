"""Accounts of heartbeats become lines of the log and of the status."""

from __future__ import annotations

import gzip
import json
import random
import sys
import time
from pathlib import Path

import pytest

from paceline.membership.accounts import Verdicts, why_damaged
from paceline.membership.effects import Warn
from paceline.observe.account import COMPUTE, DATA, FIGURES, SERVER_PARTS, WAIT, WORKER_PARTS
from paceline.observe.verdicts import Verdict
from paceline.wire import messages as m
from paceline.wire.limits import MAX_NUMEL


def member(rank: int, role: str = "worker") -> m.Member:
    return m.Member(role, rank, 0, f"h{rank}", "", 1, "", b"")


def beat(round: int, data_s: float, group: int = 0, wait_s: float = 0.0) -> m.AccountReport:
    parts = [0] * len(WORKER_PARTS)
    parts[DATA], parts[COMPUTE], parts[WAIT] = round_us(data_s), 100_000, round_us(wait_s)
    return m.AccountReport([m.Window(round, 1, 32.0, parts)], group=group)


def round_us(seconds: float) -> int:
    return round(1e6 * seconds)


def told(verdicts: Verdicts, slow: int, groups: list[list[int]] | None = None, own_groups: bool = False) -> list[str]:
    said = []
    for round in range(1, 60):
        for rank in range(4):
            account = beat(round, 0.2 if rank == slow and round > 30 else 0.001, 1 + rank // 2 if own_groups else 0)
            said += verdicts.note(member(rank), account, groups or [], float(round))
    return [one.text for one in said if isinstance(one, Warn)]


def test_slow_worker_is_in_the_log_once_and_in_the_status_until_it_leaves() -> None:
    verdicts = Verdicts()
    (line,) = told(verdicts, slow=2)
    assert "worker 2 on h2" in line
    assert "its data loader" in line
    assert len(verdicts.sentences) == 1
    verdicts.leave(member(2))
    assert verdicts.sentences == []
    (change,) = verdicts.told(100.0)
    assert (change.role, change.rank, change.text) == ("worker", 2, line)
    assert 100.0 - 60 < change.ago_s < 100.0 - 30
    (end,) = verdicts.end()
    assert isinstance(end, Warn)
    assert "worker 2 on h2 (its data loader)" in end.text


def cost_s(workers: int) -> float:
    """Return the processor's time of one heartbeat, the least of several rounds."""
    verdicts, found = Verdicts(), []
    for round in range(1, 24):
        began = time.thread_time()
        for rank in range(workers):
            verdicts.note(member(rank), beat(round, 1e-3 * (1 + (7 * rank + round) % 5)), [], float(round))
        found.append((time.thread_time() - began) / workers)
    return min(found[-4:])


def test_heartbeat_costs_little_more_in_a_job_of_many_workers() -> None:
    """32 times as many workers; sorting the figures of all of them for each heartbeat makes it 5 times as dear."""
    tracer = sys.gettrace()  # that of coverage, which makes every line dearer
    sys.settrace(None)
    try:
        assert cost_s(256) < 3 * cost_s(8)
    finally:
        sys.settrace(tracer)


def test_job_without_slow_workers_ends_without_a_line() -> None:
    verdicts = Verdicts()
    assert told(verdicts, slow=-1) == []
    assert verdicts.end() == []


def test_status_keeps_the_last_changes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = Verdicts()
    monkeypatch.setattr(verdicts, "_of_worker", lambda *told: [Verdict(1, "h1", "data", DATA, 2.3, 0.8, 7, 0.0)])
    for turn in range(70):
        verdicts.note(member(1), beat(turn, 0.2), [], float(turn))
    assert [one.ago_s for one in verdicts.told(70.0)] == [float(ago) for ago in range(50, 0, -1)]


def test_workers_are_compared_in_their_groups() -> None:
    (line,) = told(Verdicts(), slow=2, groups=[[0, 1, 3], [2]])
    assert "as long as before" in line
    (line,) = told(Verdicts(), slow=3, own_groups=True)
    assert "as long as the others" in line


def test_recent_account_is_that_of_the_last_windows() -> None:
    verdicts = Verdicts()
    assert verdicts.recent(("worker", 0)) == []
    told(verdicts, slow=-1)
    (window,) = verdicts.recent(("worker", 0))
    assert (window.rounds, window.samples, window.parts[COMPUTE]) == (15, 480.0, 1_500_000)
    server = member(0, "server")
    for turn in range(30):
        verdicts.note(server, m.AccountReport([m.Window(turn, 1, 2.0, [100_000] * len(SERVER_PARTS))]), [], 0.0)
    (window,) = verdicts.recent(("server", 0))
    assert (window.samples, window.parts[0]) == (30.0, 1_500_000)


@pytest.mark.parametrize(("role", "right"), [("worker", len(WORKER_PARTS)), ("server", len(SERVER_PARTS))])
def test_account_with_other_parts_is_damaged(role: str, right: int) -> None:
    for parts in range(right + 3):
        damage = why_damaged(role, m.AccountReport([m.Window(5, 1, 1.0, [1] * parts)]), 1)
        assert damage == ("" if parts == right else f"the account of a {role} has {right} parts, not {parts}")


@pytest.mark.parametrize("figures", range(len(FIGURES) + 2))
def test_account_with_other_figures_of_the_host_is_damaged(figures: int) -> None:
    damage = why_damaged("worker", m.AccountReport(host=[1] * figures), 1)
    assert bool(damage) == (figures not in (0, len(FIGURES)))


#: By recording: the reason that the first line names, and the process. All have four workers on a machine of two
#: processors, and the fault from round 30 on (``tests/observe/matrix.py --record``); but the last one, which is that of
#: ``tests/observe/test_jobs.py`` with collections from round 12 on, beside eight processes that only use up time.
RECORDED = {
    "none": ("", ""),
    "starved": ("", ""),
    "memory": ("worker 1", "reclaiming memory"),
    "link": ("worker 1", "its network"),
    "neighbour": ("worker 1", "other processes on its processors"),
    "quota": ("worker 1", "the CPU quota of its cgroup"),
    "stops": ("worker 1", "stops of the whole process"),
    "gc": ("worker 1", "Python's garbage collection"),
    "server": ("server 0", "the CPU quota of its cgroup is used up"),
    "gc beside load": ("worker 1", "Python's garbage collection"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_accounts_of_real_jobs_name_the_right_one_or_nobody(name: str) -> None:
    recorded = json.loads(gzip.decompress(Path(__file__).with_name("recorded.json.gz").read_bytes()))[name]
    verdicts, said = Verdicts(), []
    for role, rank, host, windows, figures, late in recorded:
        figures.extend([0] * (len(FIGURES) - len(figures) if figures else 0))  # some are new since
        account = m.AccountReport([m.Window(*one) for one in windows], figures, [tuple(one) for one in late], 0)
        member = m.Member(role, rank, 0, host, host, 1, "", b"")
        said += [one.text for one in verdicts.note(member, account, (), 0.0) if isinstance(one, Warn)]
    who, reason = RECORDED[name]
    if not who:
        assert said == []
        return
    assert said[0].startswith(who)
    assert reason in said[0]


def test_accounts_of_servers_add_up_to_late_workers_and_staleness() -> None:
    verdicts = Verdicts()
    for rank, held in ((0, (100, 2)), (1, (60, 1)), (1, (0, 0))):  # stores close before the job ends
        account = m.AccountReport(late=[(3, 4, 500_000), (1, 1, 1)], staleness=[(1, 5), (2**40 + 1, 1)], held=held)
        verdicts.note(m.Member("server", rank, 0, "h", "h", 1, "", b""), account, (), 0.0)
    assert verdicts.late(("worker", 3)) == (12, 1.5)
    assert verdicts.late(("server", 3)) == verdicts.late(("worker", 0)) == (0, 0.0)
    assert verdicts.cohorts == 15
    assert verdicts.staleness == [(1, 15), (2**40, 3)]
    assert [verdicts.held((role, 1)) for role in ("server", "worker")] == [(60, 1), (0, 0)]


def strange(chance: random.Random, role: str) -> m.AccountReport:
    """Return an account that a message can carry: parts that take no time, no rounds, hours, figures of nothing."""
    zeros = chance.random()

    def number() -> int:
        return 0 if chance.random() < zeros else chance.choice((1, 900, 100_000, 500_000, 10**9, MAX_NUMEL))

    parts = len(SERVER_PARTS if role == "server" else WORKER_PARTS)
    windows = [
        m.Window(number(), number(), float(number()), [number() for _ in range(parts)], number())
        for _ in range(chance.choice((0, 1, 1, 4)))
    ]
    late = [
        (chance.randrange(5), 1 + number(), number()) for _ in range(chance.randrange(3) if role == "server" else 0)
    ]
    host = [number() for _ in FIGURES] if chance.random() < 0.8 else []
    is_ddp, is_shared = chance.random() < 0.01, chance.random() < 0.1
    return m.AccountReport(windows, host, late, chance.choice((0, 0, 1, 2)), is_ddp=is_ddp, is_shared=is_shared)


@pytest.mark.parametrize("seed", range(12))
def test_every_account_that_a_message_can_carry_is_taken(seed: int) -> None:
    chance, verdicts = random.Random(seed), Verdicts()
    for now in range(400):
        role, rank = chance.choice(("worker", "worker", "server")), chance.randrange(3)
        is_usual = role == "worker" and chance.random() < (0.9, 0.5, 0.0)[seed % 3]
        account = beat(now, 0.001, wait_s=(0.1, 1e12)[seed % 2]) if is_usual else strange(chance, role)
        assert not why_damaged(role, account, 10**6)
        verdicts.note(member(rank, role), account, [], float(now))
        if chance.random() < 0.02:
            verdicts.leave(member(rank, role))
        assert all(verdicts.sentences)
        assert all(one.lost >= 0 for one in verdicts.slow)
    assert all(isinstance(one, Warn) for one in verdicts.end())
