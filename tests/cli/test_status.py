"""The table of ``paceline status``."""

from __future__ import annotations

from paceline.cli.status import rows_of, shown
from paceline.observe.account import DATA, WAIT, WORKER_PARTS
from paceline.wire import messages as m


def row(rank: int, step_s: float, role: str = "worker", state: str = "live", round: int = 7) -> dict[str, object]:
    rest = {"host": f"h{rank}", "round": round, "pace": 1.0, "waits_for": [], "sent": 0, "received": 0, "memory": 0}
    return {"role": role, "rank": rank, "state": state, "step_s": step_s, "silent_s": 0.1} | rest


def test_slow_worker_is_named_after_the_table() -> None:
    rows = [row(0, 0.0, "server"), row(0, 0.1), row(2, 0.24)]
    lines = shown(rows, ["dist_sync: why"], ["worker 2 on h2 takes 2.2 times as long"]).split("\n")
    assert lines[-2:] == ["worker 2 on h2 takes 2.2 times as long", "dist_auto: dist_sync: why"]
    assert "240 ms" in lines[3]


def test_rows_have_the_parts_of_steps_as_shares() -> None:
    worker = m.Member("worker", 0, 0, "h", "h", 1, "", b"")
    state = m.MemberState(7, 1.0, 0.1, 0, 0, 0, "live", "", 0.1)
    assert rows_of(m.Status([worker], [state], []))[0]["parts"] == {}
    parts = [0] * len(WORKER_PARTS)
    parts[DATA], parts[WAIT] = 300_000, 700_000
    state.recent = [m.Window(0, 10, 320.0, parts)]
    found = rows_of(m.Status([worker], [state], []))[0]["parts"]
    assert (found["data"], found["wait"], found["compute"], found["samples_per_s"]) == (0.3, 0.7, 0.0, 320.0)


def test_what_dist_auto_does_and_advises_comes_last() -> None:
    lines = shown([row(0, 0.1)], ["dist_async: why", "dist_gsync with 2 groups from now on: why"]).split("\n")
    assert lines[-2:] == ["dist_auto: dist_async: why", "dist_auto: dist_gsync with 2 groups from now on: why"]


def test_worker_that_left_while_others_train_on_is_named() -> None:
    lines = shown([row(0, 0.0), row(1, 0.0, state="left"), row(2, 0.0, state="left", round=3)]).split("\n")
    assert lines[-1] == "worker 2 on h2 left the job after round 3; others are in round 7"
    assert len(lines) == 5
