"""Figures of the job: means over the workers, step by step."""

from __future__ import annotations

import math

import pytest

from paceline.observe.job_figures import HOLD_S, KEPT, LATE_S, MOST_OPEN, JobFigures
from paceline.wire import messages as m
from paceline.wire.limits import MAX_FIGURES


def loss(step: int, value: float, samples: float = 1.0, name: str = "loss") -> m.ReportedFigures:
    return m.ReportedFigures(step, samples, {name: value})


def told(job: JobFigures) -> list[tuple[str, int, float]]:
    return [(one.name, one.step, one.value) for one in job.history]


def test_figure_of_a_step_is_the_mean_weighted_by_samples() -> None:
    job = JobFigures()
    job.note(0, [loss(1, 1.0, 30.0), loss(2, 2.0, 30.0)], 0.0)
    job.settle([0, 1], 0.5)
    assert told(job) == []
    job.note(1, [loss(1, 5.0, 10.0)], 1.0)
    job.settle([0, 1], 1.0)
    assert told(job) == [("loss", 1, 2.0)]
    assert job.of_job() == {"loss": (1, 2.0)}
    assert job.of_worker(0) == {"loss": (2, 2.0)}
    assert job.of_worker(1) == {"loss": (1, 5.0)}
    assert job.of_worker(2) == {}


def test_figure_that_one_worker_reports_waits_a_moment_for_the_others() -> None:
    job = JobFigures()
    job.note(0, [loss(1, 0.5)], 0.0)
    job.settle([0, 1], HOLD_S - 0.1)
    assert told(job) == []
    job.settle([0, 1], HOLD_S)
    assert told(job) == [("loss", 1, 0.5)]


def test_worker_that_is_far_behind_does_not_hold_the_others_up() -> None:
    job = JobFigures()
    for rank in range(2):
        job.note(rank, [loss(1, 1.0)], 0.0)
    job.note(0, [loss(2, 3.0)], 1.0)
    job.settle([0, 1], 1.0 + LATE_S - 0.1)
    assert told(job) == [("loss", 1, 1.0)]
    job.settle([0, 1], 1.0 + LATE_S)
    assert told(job)[1:] == [("loss", 2, 3.0)]
    job.note(1, [loss(2, 9.0), loss(3, 4.0)], 20.0)  # step 2 is complete without it
    job.note(0, [loss(3, 2.0)], 20.0)
    job.settle([0, 1], 20.0)
    assert told(job)[2:] == [("loss", 3, 3.0)]


def test_worker_that_has_left_is_not_waited_for() -> None:
    job = JobFigures()
    for rank in range(2):
        job.note(rank, [loss(1, 1.0)], 0.0)
    job.note(0, [loss(2, 3.0)], 1.0)
    job.settle([0], 1.0)
    assert told(job) == [("loss", 1, 1.0), ("loss", 2, 3.0)]


def test_steps_that_are_counted_anew_follow_the_ones_before() -> None:
    job = JobFigures()
    for step, value in ((0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0)):
        for rank in range(2):
            job.note(rank, [loss(step, value)], 0.0)
    job.settle([0, 1], 0.0)
    assert [one[1:] for one in told(job)] == [(0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0)]


def test_all_steps_are_complete_at_the_end() -> None:
    job = JobFigures()
    job.note(0, [loss(1, 1.0), loss(2, 2.0)], 0.0)
    job.note(1, [loss(2, 4.0)], 0.0)
    job.settle((), math.inf)
    assert told(job) == [("loss", 1, 1.0), ("loss", 2, 3.0)]


def test_figures_wait_and_are_kept_within_bounds() -> None:
    job = JobFigures()
    job.note(1, [loss(0, 0.0)], 0.0)
    for step in range(3 * KEPT):
        job.note(0, [loss(step, float(step))], 0.0)
        if step % 64 == 0:
            job.settle([0, 1], 0.0)
    assert len(job.history) == KEPT
    assert job.made >= 3 * KEPT - MOST_OPEN - 64
    assert len(job.since(0)) == KEPT
    assert job.since(job.made) == []
    assert [one.step for one in job.since(job.made - 2)] == [one.step for one in list(job.history)[-2:]]


def test_names_beyond_the_bound_are_left_out_and_named_once() -> None:
    job = JobFigures()
    assert job.note(0, [loss(1, 1.0, name=f"n{number}") for number in range(MAX_FIGURES)], 0.0) == ""
    line = job.note(3, [loss(1, 1.0, name="one"), loss(1, 1.0, name="two")], 0.0)
    assert line == "a job has at most 64 reported figures; 'one' of worker 3 and others are left out"
    assert job.note(3, [loss(2, 1.0, name="three")], 0.0) == ""
    assert job.of_worker(3) == {}


@pytest.mark.parametrize("value", [1e308, -1e308])
def test_large_values_have_a_finite_mean(value: float) -> None:
    job = JobFigures()
    for rank in range(3):
        job.note(rank, [loss(1, value, 2.0**48)], 0.0)
    job.settle([0, 1, 2], 0.0)
    assert job.of_job()["loss"][1] == pytest.approx(value)
