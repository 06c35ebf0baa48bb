"""How far a script is, and how long it still takes."""

from __future__ import annotations

import sys

from paceline.observe.reports import ReportedSteps
from paceline.wire import decode_request, encode
from paceline.wire import messages as m
from paceline.wire.limits import MAX_AMOUNT


def reported(*steps: tuple[int, int, float]) -> ReportedSteps:
    one = ReportedSteps()
    for step, total, now in steps:
        one.note(step, total, now)
    return one


def test_time_that_is_left_is_that_of_the_steps_that_are_left() -> None:
    assert ReportedSteps().at(1.0) is None
    assert reported((0, 10, 100.0)).at(100.0) == m.StepsLeft(0, 10, None)
    assert reported((0, 10, 100.0), (4, 10, 108.0)).at(108.0) == m.StepsLeft(4, 10, 12.0)
    assert reported((0, 10, 100.0), (1, 10, 101.0), (4, 10, 108.0)).at(108.0) == m.StepsLeft(4, 10, 12.0)


def test_it_goes_down_between_reports_and_never_below_zero() -> None:
    one = reported((0, 10, 100.0), (5, 10, 110.0))
    assert one.at(113.0) == m.StepsLeft(5, 10, 7.0)
    assert one.at(500.0) == m.StepsLeft(5, 10, 0.0)


def test_a_job_that_goes_on_from_a_checkpoint_counts_its_own_steps_only() -> None:
    assert reported((500, 1000, 7.0), (510, 1000, 27.0)).at(27.0) == m.StepsLeft(510, 1000, 980.0)


def test_lower_step_and_another_total_begin_anew() -> None:
    assert reported((0, 10, 0.0), (8, 10, 8.0), (0, 10, 9.0)).at(9.0) == m.StepsLeft(0, 10, None)
    assert reported((0, 10, 0.0), (8, 10, 8.0), (8, 20, 9.0), (9, 20, 12.0)).at(12.0) == m.StepsLeft(9, 20, 33.0)


def test_total_that_is_never_reached_is_told_in_a_heartbeat_that_can_be_read() -> None:
    left = reported((0, sys.maxsize, 0.0), (1, sys.maxsize, 60.0)).at(60.0)
    found, _ = decode_request([encode(1, 0, m.Heartbeat(1, progress=left))])
    assert found.body == m.Heartbeat(1, progress=m.StepsLeft(1, sys.maxsize, MAX_AMOUNT))


def test_last_step_is_the_end() -> None:
    assert reported((10, 10, 0.0)).at(0.0) == m.StepsLeft(10, 10, 0.0)
    assert reported((0, 10, 0.0), (12, 10, 12.0)).at(12.0) == m.StepsLeft(12, 10, 0.0)
