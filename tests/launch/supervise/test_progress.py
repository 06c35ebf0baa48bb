"""When the scheduler is asked, and what is shown of its answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.launch.runtime import JobRecord
from paceline.launch.supervise.console import ERR, OUT, Console
from paceline.launch.supervise.progress import Watch
from paceline.observe.account import WORKER_PARTS
from paceline.wire import messages as m
from tests.launch.supervise.screens import Terminal

RECORD = JobRecord("1a2b", 1, "", 0.0, "python train.py", ("h0",), 2, 0)


def status(round: int, verdicts: tuple[str, ...] = ()) -> str:
    members = [m.Member("worker", rank, 0, f"h{rank}", f"h{rank}", 1, "", b"") for rank in range(2)]
    window = m.Window(0, 10, 320.0, [1_000_000, *[0] * (len(WORKER_PARTS) - 1)])
    recent = [window] if round else []
    states = [m.MemberState(round, 1.0, 0.1, 0, 0, 0, "live", "", 0.1 * (rank + 1), recent) for rank in range(2)]
    return msgspec.json.encode(m.Status(members, states, [], [], list(verdicts))).decode()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(60, 30)
    yield made
    made.close()


def lines(fd: int) -> list[str]:
    return os.pread(fd, 1 << 20, 0).decode().splitlines()


def test_without_a_terminal_lines_come_ever_more_rarely_and_the_first_says_how_to_look(log: int) -> None:
    watch, asked = Watch(RECORD, Console({OUT: log, ERR: log}), 0.0), []
    for second in range(400):
        if watch.turn(second, ""):
            asked.append(second)
            watch.take(status(round=second), second)
    assert asked == [10, 20, 40, 80, 140, 200, 260, 320, 380]
    rest = "round {:,}, 640 samples/s, slowest: worker 1 on h1 (200 ms a step)"
    assert lines(log)[:2] == [
        f"[launch] job 1a2b (paceline top 1a2b), 10 s: {rest.format(10)}",
        f"[launch] 20 s: {rest.format(20)}",
    ]
    assert len(lines(log)) == len(asked)


def test_line_without_news_is_not_repeated(log: int) -> None:
    watch = Watch(RECORD, Console({OUT: log, ERR: log}), 0.0)
    for second in range(200):
        if watch.turn(second, ""):
            watch.take(status(round=0), second)
    (line,) = lines(log)
    assert line.startswith("[launch] job 1a2b (paceline top 1a2b), 10 s: all have joined, no step yet, ")


def test_phase_is_told_instead_of_asking_and_a_silent_scheduler_is_named(log: int) -> None:
    watch = Watch(RECORD, Console({OUT: log, ERR: log}), 0.0)
    assert not watch.turn(10.0, "waiting for h1 to answer")
    assert watch.turn(20.0, "")
    assert not watch.turn(40.0, "")
    assert [line.partition(": ")[2] for line in lines(log)] == [
        "waiting for h1 to answer", "the scheduler has not answered for 20 s",
    ]  # fmt: skip


def test_status_that_is_too_long_is_asked_for_again(log: int) -> None:
    watch = Watch(RECORD, Console({OUT: log, ERR: log}), 0.0)
    assert watch.turn(10.0, "")
    watch.take("", 10.1)
    assert watch.turn(20.0, "")
    assert lines(log) == []


def test_panel_shows_each_answer_and_the_phases_of_the_start(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    watch = Watch(RECORD, Console({OUT: terminal.fd, ERR: terminal.fd}, {"TERM": "xterm"}, has_panel=True), 0.0)
    assert not watch.turn(0.0, "waiting for the scheduler to listen")
    terminal.wait_for(lambda: terminal.shows("waiting for the scheduler to listen"), "the phase")
    assert watch.due == 1.0
    assert watch.turn(1.0, "")
    terminal.wait_for(lambda: terminal.shows("0 of 2 processes have joined"), "the start")
    watch.take(status(1310, ("worker 1 on h1 takes 2.3 times as long as the others",)), 1.1)
    terminal.wait_for(lambda: terminal.shows("worker 1 on h1 takes 2.3 times as long as the others"), "the verdict")
    assert terminal.shows("round 1,310  640 samples/s")
    assert terminal.shows("worker 1  h1 ")
    assert not terminal.shows("waiting for")
