"""What other tools tell of a job is read as they mean it; where they are installed, a real job shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.observe.faulty_worker import ONSET, SLOW
from tests.observe.peers import CAUSES, TOOLS, WHY_NOT, Told, cell, run, told_by_nvrx, told_by_traceml

#: Environment that ``nox -s slow-peers`` makes.
VENV = os.environ.get("PACELINE_TEST_PEERS", "")


def summary(kind: str, **more: Any) -> dict[str, Any]:
    return {"step_time": {"diagnosis": {"kind": kind, "summary": "why", **more}}}


def test_stragglers_of_traceml_are_ranks_with_a_component() -> None:
    told = told_by_traceml(summary("INPUT_STRAGGLER", ranks=[SLOW], evidence={"component": "input"}))
    assert told == Told(frozenset([SLOW]), frozenset(["input"]))
    assert told.judge("TraceML", "loader") == (True, True)
    assert told.judge("TraceML", "backward") == (True, False)
    assert told.judge("TraceML", "none") == (False, False)
    assert told_by_traceml(summary("COMPUTE_BOUND", ranks=[0])).judge("TraceML", "none") == (True, True)
    assert cell("TraceML", "loader", [told_by_traceml(summary("INSUFFICIENT_STEP_TIME_DATA"))]) == "- (why)"


def test_stragglers_of_nvrx_are_those_of_most_reports_since_the_fault_began() -> None:
    before, noise = (9, {"data": [0]}), (ONSET + 19, {"data": [SLOW, 3], "forward": [0]})
    told = told_by_nvrx([before, (ONSET + 10, {"data": [SLOW]}), noise, (ONSET + 29, {"data": [SLOW]})], "loader")
    assert told == Told(frozenset([SLOW]), frozenset(["data"]))
    assert cell("NVRx", "loader", [told, Told()]) == "worker 1/2, cause 1/2"
    assert cell("NVRx", "quota", [told]) == "worker 1/1"


def test_every_fault_of_the_matrix_is_tried_or_told_why_not() -> None:
    from tests.observe.matrix import RIGHT

    assert {one for one in RIGHT if not one.startswith("crowd")} == CAUSES.keys() | WHY_NOT.keys()


@pytest.mark.skipif(not VENV, reason="PACELINE_TEST_PEERS names no environment with TraceML and NVRx")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_real_job_with_a_slow_loader_is_told_of(tool: str, tmp_path: Path) -> None:
    told = run(tool, Path(VENV), "loader", 0.0, tmp_path / "job", 0.02)
    assert told.error == ""
    assert SLOW in told.ranks
