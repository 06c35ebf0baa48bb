"""The table of ``paceline status``."""

from __future__ import annotations

from paceline.cli.status import shown


def row(rank: int, step_s: float, role: str = "worker", state: str = "live", round: int = 7) -> dict[str, object]:
    rest = {"host": f"h{rank}", "round": round, "pace": 1.0, "waits_for": [], "sent": 0, "received": 0, "memory": 0}
    return {"role": role, "rank": rank, "state": state, "step_s": step_s, "silent_s": 0.1} | rest


def test_slow_worker_is_named_with_how_slow_it_is() -> None:
    lines = shown([row(0, 0.0, "server"), row(0, 0.1), row(1, 0.11), row(2, 0.24), row(3, 0.9, state="left")]).split(
        "\n"
    )
    assert lines[-1] == "worker 2 on h2 is slow: a step takes 2.2 times as long as most"
    assert len(lines) == 7
    assert "240 ms" in lines[4]


def test_what_dist_auto_does_and_advises_comes_last() -> None:
    lines = shown([row(0, 0.1)], ["dist_async: why", "dist_gsync with 2 groups from now on: why"]).split("\n")
    assert lines[-2:] == ["dist_auto: dist_async: why", "dist_auto: dist_gsync with 2 groups from now on: why"]


def test_worker_that_left_while_others_train_on_is_named() -> None:
    lines = shown([row(0, 0.0), row(1, 0.0, state="left"), row(2, 0.0, state="left", round=3)]).split("\n")
    assert lines[-1] == "worker 2 on h2 left the job after round 3; others are in round 7"
    assert len(lines) == 5


def test_workers_that_are_alike_or_not_measured_are_not_named() -> None:
    assert "slow" not in shown([row(0, 0.1), row(1, 0.14)])
    assert "slow" not in shown([row(0, 0.1), row(1, 0.0)])
