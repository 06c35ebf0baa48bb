"""The words for a whole job."""

from __future__ import annotations

from paceline.observe.account import WORKER_PARTS
from paceline.observe.rows import missing, progress, slowest
from paceline.wire import messages as m


def status(*step_s: float, round: int = 1310) -> m.Status:
    members = [m.Member("worker", rank, 0, f"h{rank}", f"h{rank}", 1, "", b"") for rank in range(len(step_s))]
    window = m.Window(0, 10, 320.0, [1_000_000, *[0] * (len(WORKER_PARTS) - 1)])
    recent = [window] if round else []
    return m.Status(members, [m.MemberState(round, 1.0, 0.1, 0, 0, 0, "live", "", one, recent) for one in step_s], [])


def test_progress_is_who_is_missing_then_the_round_and_the_rate() -> None:
    assert progress(status(0.1), 7, 0) == [
        "1 of 7 processes have joined", "not yet: worker 1, worker 2, worker 3, worker 4 and 2 more",
    ]  # fmt: skip
    assert progress(status(*[0.0] * 7, round=0), 7, 0) == ["all have joined, no step yet"]
    assert progress(status(*[0.1] * 7), 7, 0) == ["round 1,310", "2,240 samples/s"]
    dead = status(0.0, round=0)
    dead.deaths.append(m.Death("worker", 1, "h1", "its process ended before it joined"))
    assert progress(dead, 2, 0) == ["no step yet"]


def test_progress_is_the_slowest_workers_way_to_the_last_step_where_a_total_is_known() -> None:
    job = status(0.1, 0.2)
    ways = [m.StepsLeft(120, 5000, 60.0), m.StepsLeft(100, 5000, 150.0)]
    for state, way in zip(job.states, ways, strict=True):
        state.progress = way
    assert progress(job, 2, 0) == ["step 100 of 5,000", "640 samples/s", "2 min left"]
    job.states[1].phase = "left"
    assert progress(job, 2, 0) == ["step 120 of 5,000", "320 samples/s", "60 s left"]
    job.states[0].progress = m.StepsLeft(1, 5000)
    assert progress(job, 2, 0) == ["step 1 of 5,000", "320 samples/s"]


def test_job_of_another_machine_misses_nobody() -> None:
    assert missing(status(0.1), 0, 0) == []


def test_slowest_is_named_where_there_are_two_to_compare() -> None:
    assert slowest(status(0.1, 0.23)) == "slowest: worker 1 on h1 (230 ms a step)"
    assert slowest(status(0.1)) == slowest(status(0.0, 0.0)) == ""
