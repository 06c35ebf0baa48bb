"""How many steps a period has, and when its fragments are due."""

import pytest
import torch

from paceline.hetero.local_period import MOST_STEPS, Pace, Period, Progress, Quadratic
from paceline.optim.local_choices import LocalChoices


@pytest.mark.parametrize(
    ("text", "period"),
    [
        (32, Period(32)),
        ("30 s", Period(seconds=30.0)),
        ("0.5 s", Period(seconds=0.5)),
        ("by speed", Period(100, by_speed=True)),
        ("32 by speed", Period(32, by_speed=True)),
    ],
)
def test_period_is_read(text, period):
    assert Period.parse(text) == period


@pytest.mark.parametrize("text", [0, -1, True, 1.5, "", "fast", "0 s", "nan s", "inf s", "x s", "0 by speed", None])
def test_other_periods_are_refused_with_the_allowed_forms(text):
    with pytest.raises(ValueError, match="by speed"):
        Period.parse(text)


def steps_of(period, schedule=None, **pace):
    progress = Progress(period, 1, schedule, 0.0)
    progress.step(0.0, lambda: Pace(**pace))
    return progress.steps


def test_slow_workers_take_as_many_steps_as_fit():
    period = Period(32, by_speed=True)
    expected = {0.25: 32, 0.255: 32, 0.5: 16, 1.0: 8, 9.0: 1, 0.0: 32, 0.2: 32}
    assert {step_s: steps_of(period, step_s=step_s, fastest_s=0.25) for step_s in expected} == expected
    assert steps_of(period, step_s=0.5) == 32


def test_fragments_are_due_after_equal_parts_and_time_begins_anew():
    progress = Progress(Period(5), 2, None, 0.0)
    due = [list(progress.step(0.0, Pace)) for _ in range(10)]
    assert due == [[], [], [0], [], [1]] * 2
    progress = Progress(Period(seconds=4.0), 2, None, 10.0)
    due = [list(progress.step(now, Pace)) for now in (11.0, 12.0, 13.5, 14.5, 15.0, 19.0)]
    assert due == [[], [0], [], [1], [], [0, 1]]
    few = Progress(Period(4, by_speed=True), 4, None, 0.0)
    assert list(few.step(0.0, lambda: Pace(4.0, 1.0))) == [0, 1, 2, 3]


def test_saved_progress_goes_on():
    progress, other = (Progress(Period(8), 2, Quadratic(), 0.0) for _ in range(2))
    rates = [0.1, *[0.05] * 20]
    due = [list(progress.step(0.0, lambda rate=rate: Pace(lr=rate))) for rate in rates]
    for rate in rates[:12]:
        before = progress.state() if rate == 0.1 else other.state()
        other.step(0.0, lambda rate=rate: Pace(lr=rate))
    saved = Progress(Period(8), 2, Quadratic(), 0.0)
    saved.load(other.state(), 0.0)
    assert before != other.state() == saved.state()
    assert [list(saved.step(0.0, lambda: Pace(lr=0.05))) for _ in rates[12:]] == due[12:]
    assert saved.steps == 32


def test_period_grows_with_the_square_of_the_falling_learning_rate():
    adam, sgd, given = Quadratic(), Quadratic.parse("qsr", 1 / 32), Quadratic.parse("qsr 0.0175", 1.0)
    progress = Progress(Period(4), 1, adam, 0.0)
    steps = []
    for rate in (0.004, 0.008, 0.008, 0.004, 0.002, 0.0):
        while progress.step(0.0, lambda rate=rate: Pace(lr=rate)) == range(0):
            pass
        steps.append(progress.steps)
    assert steps == [4, 4, 4, 16, 64, MOST_STEPS]
    assert [sgd.steps(2, rate, 0.8) for rate in (0.8, 0.2, 0.1, 0.05)] == [2, 2, 4, 16]
    assert [given.steps(4, rate, 9.0) for rate in (0.008, 0.004, 1e-9)] == [4, 19, MOST_STEPS]
    assert steps_of(Period(4, by_speed=True), adam, step_s=2.0, fastest_s=1.0, lr=0.1) == 2


@pytest.mark.parametrize("schedule", ["", "quadratic", "qsr 0", "qsr x", "qsr inf", "qsr 1 2", None])
def test_other_schedules_are_refused_with_the_allowed_forms(schedule):
    with pytest.raises(ValueError, match="alpha"):
        Quadratic.parse(schedule, 1.0)


@pytest.mark.parametrize(
    "options", [{"fragments": 0}, {"fragments": 5}, {"delay": -1}, {"delay": 4}, {"blend": 1.5}, {"blend": -0.1}]
)
def test_wrong_choices_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LocalChoices(Period(4), **options)


def test_period_of_a_time_has_no_schedule_and_options_need_a_period():
    sgd = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(ValueError, match="number of steps"):
        LocalChoices.of(sgd, "30 s", "qsr")
    with pytest.raises(ValueError, match="number of steps"):
        LocalChoices.of(sgd, "auto", "qsr")
    for options in ({"fragments": 2}, {"blend": 0.5}, {"schedule": "qsr"}, {"outer": {"lr": 1.0}}):
        with pytest.raises(ValueError, match="belong to local_steps="):
            LocalChoices.of(sgd, None, **options)
    assert LocalChoices.of(sgd, 2, "qsr").schedule == Quadratic(share=1 / 32)
    assert LocalChoices.of(torch.optim.Adam([torch.zeros(1)]), 2, "qsr").schedule == Quadratic()
    assert LocalChoices.of(sgd, None, fragments=1) is None
