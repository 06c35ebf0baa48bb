"""The history of a job for its page."""

from __future__ import annotations

import pytest

from paceline.observe.account import COMPUTE, DATA, SERVER_PARTS, WORKER_PARTS
from paceline.observe.page_history import LANE, MOST_EVENTS, RATE, PageHistory, Point, Series
from paceline.wire import messages as m


def worker(rank: int) -> m.Member:
    return m.Member("worker", rank, 0, f"h{rank}", f"h{rank}", 1, "", b"")


def state(rounds: int, phase: str = "live", sent: int = 0) -> m.MemberState:
    """A worker that has computed for 0.4 s in each round, after 0.1 s of loading, with 8 samples."""
    parts = [0] * len(WORKER_PARTS)
    parts[DATA], parts[COMPUTE] = 100_000 * rounds, 400_000 * rounds
    whole = [m.Window(1, rounds, 8.0 * rounds, parts)] if rounds else []
    return m.MemberState(rounds, 2.0, 0.1, 0, sent, 0, phase, "", 0.5, whole, whole)


def status(*states: m.MemberState, **more: object) -> m.Status:
    return m.Status([worker(rank) for rank in range(len(states))], list(states), [], **more)  # type: ignore[arg-type]


def history() -> PageHistory:
    return PageHistory("1a2b", 1, 0, 1e9, 100.0)


# ---- points ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 10, 11, 31, 1000, 20_011])
def test_series_keeps_few_points_all_sums_the_whole_time_and_the_last_points_as_they_are(number: int) -> None:
    series = Series(10, 20)
    for index in range(number):
        series.add(Point(0.5 * index, 0.5, (1.0, index)))
    kept = series.copy()
    recent, older = kept["recent"], kept["older"]
    assert recent == [Point(0.5 * index, 0.5, (1.0, index)) for index in range(max(0, number - 10), number)]
    assert len(older) <= 20
    every = [*older, *recent]
    assert sum(one.sums[0] for one in every) == number
    assert sum(one.sums[1] for one in every) == sum(range(number))
    ends = [0.0, *(one.start + one.span for one in every)]
    assert [one.start for one in every] == pytest.approx(ends[:-1])
    spans = [one.span for one in older[:-1]]  # the last one still grows
    assert not spans or max(spans) <= 3 * min(spans)


# ---- lanes -----------------------------------------------------------------------------------------------------------


def test_lane_has_the_parts_of_a_members_time_since_its_last_point() -> None:
    one = history()
    first = one.note(status(state(2)), 102.0)["lanes"]["worker 0"]
    assert first == Point(1.0, 1.0, (2, 16.0, 200_000, 800_000, *[0] * 8))
    assert one.note(status(state(2)), 103.0)["lanes"] == {}  # a round that lasts longer than a second
    assert one.note(status(state(5)), 104.0)["lanes"]["worker 0"] == Point(
        2.0, 2.0, (3, 24.0, 300_000, 1_200_000, *[0] * 8)
    )


def test_account_that_begins_anew_is_not_subtracted() -> None:
    one = history()
    one.note(status(state(5)), 102.0)
    assert one.note(status(state(1)), 103.0)["lanes"]["worker 0"].sums[:2] == (1, 8.0)


def test_rate_is_the_one_of_the_panel() -> None:
    one = history()
    told = one.note(status(state(4), state(4), state(4, "left")), 102.0)
    assert told["state"]["rate"] == 32.0  # 16 samples a second, of two live workers
    assert told["rate"] == Point(0.0, 2.0, (64.0,))
    assert told["state"]["head"] == ["round 4", "32 samples/s"]


def test_traffic_is_a_rate_that_follows() -> None:
    one = history()
    rows = [one.note(status(state(1, sent=1000 * second)), 100.0 + second)["state"]["rows"][0] for second in range(30)]
    assert rows[0]["sends"] == 0
    assert rows[-1]["sends"] == 1000
    assert one.note(status(state(1, sent=0)), 131.0)["state"]["rows"][0]["sends"] == 700  # a process begins anew


def test_server_has_a_lane_and_what_it_holds() -> None:
    parts = [500_000, 100_000, 0, 0, 400_000]
    member = m.Member("server", 0, 0, "h", "h", 1, "", b"")
    held = m.MemberState(0, 0.0, 0.1, 0, 0, 0, "live", "", whole=[m.Window(1, 10, 5.0, parts)], held=(1000, 4))
    told = history().note(m.Status([member], [held], []), 101.0)
    assert told["lanes"]["server 0"].sums[2:] == tuple(parts)
    assert len(parts) == len(SERVER_PARTS)
    assert (told["state"]["rows"][0]["values"], told["state"]["rows"][0]["buckets"]) == (1000, 4)


# ---- events ----------------------------------------------------------------------------------------------------------


def test_members_that_come_and_go_and_verdicts_are_events_once() -> None:
    one = history()
    texts = []
    phases = ["live", "live", "silent", "live", "dead"]
    for second, phase in enumerate(phases):
        told = [m.Told("worker", 0, second - 1.0, "it is slow")] if second >= 1 else []
        deaths = [m.Death("worker", 0, "h0", "killed by signal 9")] if phase == "dead" else []
        now = m.Status([worker(0)], [state(1, phase)], deaths, told=told)
        texts.append([text for _, text in one.note(now, 100.0 + second)["events"]])
    assert texts == [
        ["worker 0 on h0 has joined"],
        ["it is slow"],
        ["worker 0 on h0 is silent"],
        ["worker 0 on h0 is heard again"],
        ["worker 0 on h0 has died: killed by signal 9"],
    ]
    assert [when for when, _ in one.copy()["events"]] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_history_stays_small_however_long_the_job_takes() -> None:
    one = history()
    for second in range(4000):
        phase = ("live", "silent")[second // 2 % 2]
        one.note(status(state(2 * second, phase)), 101.0 + second)
    kept = one.copy()
    assert [len(kept["rate"][name]) <= most for name, most in zip(("recent", "older"), RATE, strict=True)] == [True] * 2
    lane = kept["lanes"]["worker 0"]
    assert [len(lane[name]) <= most for name, most in zip(("recent", "older"), LANE, strict=True)] == [True] * 2
    assert sum(one.sums[0] for name in ("older", "recent") for one in lane[name]) == 2 * 3999
    assert len(kept["events"]) == MOST_EVENTS


def test_copy_does_not_change_with_the_history() -> None:
    one = history()
    one.note(status(state(1)), 101.0)
    kept = one.copy()
    before = repr(kept)
    for second in range(2, 600):
        one.note(status(state(second)), 100.0 + second)
    assert repr(kept) == before
