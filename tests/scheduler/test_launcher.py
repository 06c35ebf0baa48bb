from __future__ import annotations

import fcntl
import json
import os

import pytest

from paceline.scheduler.launcher import (
    ENDED_VARIABLE,
    READY_VARIABLE,
    Ended,
    JobEnds,
    Launcher,
    StartProgress,
    StatusWanted,
)


def test_scheduler_without_a_launcher_tells_nobody() -> None:
    alone = Launcher.from_environment()
    alone.announce("tcp://127.0.0.1:1")
    assert alone.news() == []
    assert not alone.reports_ends


def test_address_failures_and_the_end_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv(READY_VARIABLE, str(write))
    launcher = Launcher.from_environment()
    assert READY_VARIABLE not in os.environ
    launcher.announce("tcp://127.0.0.1:1")
    for _ in range(2):  # each is said once
        launcher.report_failure("worker", 1, "it raised")
        launcher.report_alone("worker 0 trains alone")
        launcher.report_left("worker", 2)
        launcher.report_over()
    address, *news = os.read(read, 1000).splitlines()
    assert address == b"tcp://127.0.0.1:1"
    alone = ["alone", "worker 0 trains alone"]
    lost, left = ["lost", ["worker", 1], "it raised", False], ["left", ["worker", 2]]
    assert [json.loads(one) for one in news] == [lost, alone, left, ["over"]]
    os.close(read)
    launcher.report_failure("worker", 1, "nobody reads")
    os.close(write)


def test_ends_come_in_pieces_until_the_launcher_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv(ENDED_VARIABLE, str(read))
    launcher = Launcher.from_environment()
    assert launcher.reports_ends
    assert launcher.news() == []
    os.write(write, b'["exited", ["worker", 0], 0, ""]\n["exited", ["wor')
    assert launcher.news() == [Ended("worker", 0, 0)]
    os.write(write, b'ker", 1], 137, ""]\n')
    assert launcher.news() == [Ended("worker", 1, 137)]
    os.close(write)
    assert launcher.news() == []
    assert not launcher.reports_ends
    assert launcher.news() == []


def test_cpu_times_and_ends_come_over_one_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv(ENDED_VARIABLE, str(read))
    launcher = Launcher.from_environment()
    os.write(write, b'["runs", ["worker", 0], 2.5, true]\n["exited", ["worker", 1], 3, ""]\n')
    assert launcher.news() == [StartProgress("worker", 0, 2.5, True), Ended("worker", 1, 3)]
    os.close(write)
    launcher.news()


def test_launcher_asks_for_the_status_and_gets_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    (asked, ask), (read, write) = os.pipe(), os.pipe()
    monkeypatch.setenv(ENDED_VARIABLE, str(asked))
    monkeypatch.setenv(READY_VARIABLE, str(write))
    launcher = Launcher.from_environment()
    os.write(ask, b'["exited", ["worker", 0], 0, ""]\n["status"]\n["ends"]\n')
    assert launcher.news() == [Ended("worker", 0, 0), StatusWanted(), JobEnds()]
    for _ in range(2):  # also if nothing has changed
        launcher.report_status('["a"]')
    assert os.read(read, 1000) == 2 * b'["status", "[\\"a\\"]"]\n'
    for fd in (ask, asked, read, write):
        os.close(fd)


def test_status_that_the_pipe_cannot_take_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the scheduler would wait for a launcher whose terminal is stopped (Ctrl-S)."""
    read, write = os.pipe()
    size = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    launcher = Launcher(write, None)
    launcher.report_status("x" * size)
    assert os.read(read, 2 * size) == b'["status", ""]\n'
    launcher.report_status("x" * (size // 2))
    assert json.loads(os.read(read, 2 * size)) == ["status", "x" * (size // 2)]
    os.close(read)
    launcher.report_status("nobody reads")
    os.close(write)
