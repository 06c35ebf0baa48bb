"""The timeline is a whole JSON array at every moment, and says who was ready when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import paceline.hvd as hvd
from tests.collectives.test_errors import error_of
from tests.hvd.ranks import run


def traced(path: str) -> list[Any]:
    hvd.init()
    for _ in range(2):
        hvd.allreduce(torch.ones(3, 2), name="x")
    hvd.broadcast(torch.ones(2), 0, name="y")
    hvd.barrier()
    return json.loads(Path(path).read_text()) if hvd.rank() == 0 else []


def events_of(events: list[Any], name: str) -> list[Any]:
    [number] = [one["pid"] for one in events if one["ph"] == "M" and one["args"].get("name") == name]
    return [one for one in events if one["pid"] == number and one["ph"] != "M"]


def test_operations_and_ranks_are_in_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "timeline.json")
    environment = {"HOROVOD_TIMELINE": path, "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    events, _ = run(traced, 2, path, environment=environment)
    assert events[0]["args"]["start_time_since_epoch_in_micros"] > 1e15
    x = events_of(events, "allreduce.x")
    assert [one["ph"] for one in x].count("B") == [one["ph"] for one in x].count("E") == 6
    assert [one["name"] for one in x if one["ph"] == "B"] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "SharedPlane"] * 2
    assert sorted(one["name"] for one in x if one["ph"] == "X") == ["0", "0", "1", "1"]
    assert x[-1]["args"] == {"dtype": "float32", "shape": "[[3, 2]]"}
    assert events_of(events, "broadcast.y")
    assert any(one.get("name") == "CYCLE_START" for one in events)
    assert [one["ts"] for one in events if "ts" in one] == sorted(one["ts"] for one in events if "ts" in one)


def switched(path: str) -> list[Any]:
    hvd.init()
    hvd.allreduce(torch.ones(1), name="before")
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(1), name="inside")
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()  # rank 0 has stopped: before, "after" of rank 1 may be in the file
    hvd.allreduce(torch.ones(1), name="after")
    return json.loads(Path(path).read_text()) if hvd.rank() == 0 else []


def test_timeline_is_started_and_stopped(tmp_path: Path) -> None:
    events, _ = run(switched, 2, str(tmp_path / "t.json"), environment={"HOROVOD_TIMELINE": "DYNAMIC"})
    named = {one["args"]["name"] for one in events if one.get("name") == "process_name"}
    assert "allreduce.inside" in named
    assert not named & {"allreduce.before", "allreduce.after"}


def not_dynamic() -> str:
    hvd.init()
    return error_of(lambda: hvd.start_timeline("x"))


def test_starting_a_timeline_needs_the_variable() -> None:
    assert run(not_dynamic, 1)[0].startswith("ValueError: set HOROVOD_TIMELINE=DYNAMIC")
