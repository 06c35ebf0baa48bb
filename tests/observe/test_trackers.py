"""Trackers keep the figures of a job, and can neither stop nor delay it."""

from __future__ import annotations

import csv
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

import paceline
from paceline import extensions
from paceline.observe import tracking
from paceline.observe.account import COMPUTE, DATA, WORKER_PARTS
from paceline.observe.job_figures import JobFigure
from paceline.observe.job_view import JobView
from paceline.observe.trackers import Tracker
from paceline.observe.tracking import TrackerThread, by_step, make, overview
from paceline.wire import messages as m


class Kept(Tracker):
    """Keeps figures in memory, and fails or waits when it is told to."""

    name = "kept"
    last: Kept

    def __init__(self, target: str = "") -> None:
        super().__init__(target)
        self.logged: list[tuple[dict[str, float], int]] = []
        self.may_log, self.is_open = threading.Event(), False
        self.may_log.set()
        Kept.last = self

    def start(self, job: str) -> None:
        if self.target == "closed":
            raise OSError(f"no place for {job}")
        self.is_open = True

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.may_log.wait(60.0)
        if step == 2:
            raise ValueError("step 2 is not liked")
        self.logged.append((dict(figures), step))

    def finish(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extensions._registered, "tracker", extensions.registered("tracker"))
    paceline.register("tracker")(Kept)


def test_jsonl_has_an_object_for_each_step(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for _ in range(2):  # the second one goes on at the end
        thread = TrackerThread(f"jsonl:{path}", "job1")
        thread.put({"loss": 0.5, "accuracy": 0.75}, 1)
        thread.put({"loss": 0.25}, 2)
        thread.close(30.0)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{name: value for name, value in one.items() if name != "time"} for one in found] == 2 * [
        {"step": 1, "loss": 0.5, "accuracy": 0.75},
        {"step": 2, "loss": 0.25},
    ]
    assert all(one["time"] > 1e9 for one in found)


def test_jsonl_keeps_figures_with_the_names_of_its_own_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    thread = TrackerThread(f"jsonl:{path}", "job1")
    thread.put({"time": 0.5, "step": 7.0}, 1)
    thread.close(30.0)
    found = json.loads(path.read_text())
    assert found["time"] > 1e9
    assert (found["step"], found["figure/time"], found["figure/step"]) == (1, 0.5, 7.0)


def test_csv_has_a_line_for_each_figure_and_one_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        thread = TrackerThread("csv", "job1")
        thread.put({"loss": 0.5, "accuracy": 0.75}, 1)
        thread.close(30.0)
    with open("paceline-job1.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["time", "step", "name", "value"]
    assert [row[1:] for row in rows] == 2 * [["1", "loss", "0.5"], ["1", "accuracy", "0.75"]]


def test_failure_is_named_once_and_further_figures_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        thread = TrackerThread("kept", "job1")
        for step in (1, 2, 2, 3):
            thread.put({"loss": 0.5}, step)
        thread.close(30.0)
    assert [step for _, step in Kept.last.logged] == [1, 3]
    assert not Kept.last.is_open
    assert [one.getMessage() for one in caplog.records] == [
        "--report-to kept: ValueError: step 2 is not liked; figures are missing there; training goes on"
    ]


def test_tool_that_does_not_open_is_named_and_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        thread = TrackerThread("kept:closed", "job1")
        thread.put({"loss": 0.5}, 1)
        thread.close(30.0)
    assert Kept.last.logged == []
    assert [one.getMessage() for one in caplog.records] == [
        "--report-to kept:closed: OSError: no place for job1; figures are missing there; training goes on"
    ]


def test_slow_tool_is_waited_for_neither_now_nor_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_MOST_WAITING", 4)
    with caplog.at_level(logging.WARNING):
        thread = TrackerThread("kept", "job1")
        Kept.last.may_log.clear()
        for step in range(10, 30):
            thread.put({"loss": 0.5}, step)
        thread.close(0.05)
    try:
        lines = [one.getMessage() for one in caplog.records]
        assert len(lines) == 2
        assert "it is too slow: 4 steps wait for it, and further ones are left out" in lines[0]
        assert "it was not done 0.05 s after the end of the job" in lines[1]
    finally:
        Kept.last.may_log.set()


def test_unknown_name_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ValueError, match="unknown tool of --report-to 'tensorbord'; did you mean 'tensorboard'"):
        make("tensorbord:runs")


def test_figures_of_a_step_go_together_in_the_order_of_steps() -> None:
    figures = [JobFigure("loss", 2, 0.5), JobFigure("loss", 3, 0.25), JobFigure("accuracy", 2, 0.75)]
    assert by_step(figures) == [(2, {"loss": 0.5, "accuracy": 0.75}), (3, {"loss": 0.25})]


def test_rate_of_the_job_is_the_sum_of_unlike_workers() -> None:
    members, states = [], []
    for rank, (samples, data, phase) in enumerate(((100.0, 0, "live"), (300.0, 500_000, "silent"), (9.0, 0, "left"))):
        parts = [0] * len(WORKER_PARTS)
        parts[COMPUTE], parts[DATA] = 1_000_000 - data, data
        members.append(m.Member("worker", rank, 0, "h", "", 1, "", b""))
        recent = [m.Window(1, 4, samples, parts)]
        states.append(m.MemberState(4 + rank, 1.0, 0.1, 0, 0, 0, phase, "", 0.1, recent, [], {"loss": (3, 0.5)}))
    members.append(m.Member("server", 0, 0, "h", "", 1, "", b""))
    states.append(m.MemberState(0, 0.0, 0.1, 0, 0, 0, "live", ""))
    step, found = overview(JobView(m.Status(members, states, [])))
    assert step == 6
    assert found["throughput/samples_per_sec"] == 400.0
    assert (found["worker/0/samples_per_sec"], found["worker/1/samples_per_sec"]) == (100.0, 300.0)
    assert (found["time/data_ratio"], found["time/compute_ratio"]) == (0.25, 0.75)
    assert (found["worker/2/loss"], "worker/2/samples_per_sec" in found) == (0.5, False)
    assert overview(JobView(m.Status([], [], []))) == (0, {})
