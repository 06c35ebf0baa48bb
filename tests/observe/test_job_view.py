"""One view of a job for all its pictures."""

from __future__ import annotations

from paceline.cli.status import shown
from paceline.observe.account import DATA, WAIT, WORKER_PARTS
from paceline.observe.job_view import JobView, change_text
from paceline.wire import messages as m


def status(*step_s: float, round: int = 1310) -> m.Status:
    members = [m.Member("worker", rank, 0, f"h{rank}", f"h{rank}", 1, "", b"") for rank in range(len(step_s))]
    parts = [0] * len(WORKER_PARTS)
    parts[DATA], parts[WAIT] = 300_000, 700_000
    recent = [m.Window(0, 10, 320.0, parts)] if round else []
    return m.Status(members, [m.MemberState(round, 1.0, 0.1, 0, 0, 0, "live", "", one, recent) for one in step_s], [])


def test_progress_is_who_is_missing_then_the_round_and_the_rate() -> None:
    assert JobView(status(0.1), 7).progress == [
        "1 of 7 processes have joined", "not yet: worker 1, worker 2, worker 3, worker 4 and 2 more",
    ]  # fmt: skip
    assert JobView(status(*[0.0] * 7, round=0), 7).progress == ["all have joined, no step yet"]
    assert JobView(status(*[0.1] * 7), 7).progress == ["round 1,310", "2,240 samples/s"]
    dead = status(0.0, round=0)
    dead.deaths.append(m.Death("worker", 1, "h1", "its process ended before it joined"))
    assert JobView(dead, 2).progress == ["no step yet"]


def test_progress_is_the_slowest_workers_way_to_the_last_step_where_a_total_is_known() -> None:
    job = status(0.1, 0.2)
    ways = [m.StepsLeft(120, 5000, 60.0), m.StepsLeft(100, 5000, 150.0)]
    for state, way in zip(job.states, ways, strict=True):
        state.progress = way
    assert JobView(job, 2).progress == ["step 100 of 5,000", "640 samples/s", "2 min left"]
    job.states[1].phase = "left"
    assert JobView(job, 2).progress == ["step 120 of 5,000", "320 samples/s", "60 s left"]
    job.states[0].progress = m.StepsLeft(1, 5000)
    assert JobView(job, 2).progress == ["step 1 of 5,000", "320 samples/s"]


def test_missing_processes_are_named_where_the_size_of_the_job_is_known() -> None:
    assert JobView(status(0.1)).missing == []
    assert JobView(status(0.1), 1, 1).missing == ["server 0"]


def test_slowest_is_named_where_there_are_two_to_compare() -> None:
    assert JobView(status(0.1, 0.23)).slowest == "slowest: worker 1 on h1 (230 ms a step)"
    assert JobView(status(0.1)).slowest == JobView(status(0.0, 0.0)).slowest == ""


def test_parts_of_a_step_are_shares() -> None:
    assert JobView(status(0.1, round=0)).as_json("j")["processes"][0]["parts"] == {}
    found = JobView(status(0.1)).as_json("j")["processes"][0]["parts"]
    assert (found["data"], found["wait"], found["compute"], found["samples_per_s"]) == (0.3, 0.7, 0.0, 320.0)


def test_workers_in_the_slowest_round_are_waited_for() -> None:
    job = status(0.1, 0.1, 0.1)
    job.states[1].round -= 1
    assert [one.waits_for for one in JobView(job).members] == [[1], [], [1]]
    job.states[2].waits_for = "0 1"
    assert JobView(job).members[2].waits_for == [0, 1]


def test_text_has_the_table_then_slow_workers_those_that_left_the_choice_and_changes() -> None:
    job = status(0.1, 0.24, 0.1, round=7)
    job.states[1].phase, job.states[2].phase, job.states[2].round = "left", "left", 3
    job.verdicts, job.auto = ["worker 1 on h1 takes 2.2 times as long"], ["dist_async: why"]
    job.changes = [m.Change(0, "starts", [0, 1, 2], 0), m.Change(1, "left", [2], 3, "drain", ago_s=5.0)]
    lines = shown(JobView(job), "dist_sync: why").split("\n")
    assert "240 ms" in lines[2]
    assert lines[4:] == [
        "worker 1 on h1 takes 2.2 times as long",
        "worker 2 on h2 left the job after round 3; others are in round 7",
        "dist_auto: dist_sync: why",
        "dist_auto: dist_async: why",
        "5 s ago: worker 2 left after round 3: drain",
    ]


def test_json_has_only_what_there_is_to_tell() -> None:
    assert JobView(status(0.1)).as_json("j").keys() == {"job", "processes", "changes"}
    job = status(0.1)
    job.verdicts, job.figures = ["slow"], {"loss": (3, 0.5)}
    job.changes = [m.Change(1, "left", [0], 3, "drain", ago_s=5.0)]
    told = JobView(job).as_json("j", "dist_sync: why")
    assert (told["choice"], told["slow"], told["figures"]) == (
        "dist_sync: why", ["slow"], {"loss": {"step": 3, "value": 0.5}},
    )  # fmt: skip
    text = "worker 0 left after round 3: drain"
    assert told["changes"] == [
        {"ago_s": 5.0, "text": text, "generation": 1, "kind": "left", "workers": [0], "round": 3, "why": "drain"}
    ]


def test_changes_of_the_membership_have_sentences() -> None:
    assert [change_text(one) for one in (
        m.Change(0, "starts", [0, 1], 0),
        m.Change(1, "left", [1], 7, "SIGTERM"),
        m.Change(2, "died", [1], 7, "its process ended"),
        m.Change(3, "joins", [1], 9, "restart 1"),
        m.Change(4, "regroups", [0, 1, 2], 9, "", [[0, 2], [1]]),
        m.Change(5, "walks", [], 0, "epoch 1 of pool 'p'"),
    )] == [
        "the job starts with workers 0-1",
        "worker 1 left after round 7: SIGTERM",
        "worker 1 died after round 7: its process ended",
        "worker 1 joins after round 9: restart 1",
        "groups from now on: 0 2, 1",
        "epoch 1 of pool 'p' begins",
    ]  # fmt: skip
