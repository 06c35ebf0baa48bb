"""How long a worker computes in a round."""

from __future__ import annotations

from paceline.worker.profile import WARM_UP, RoundTimes


def test_waits_and_further_pushes_of_a_round_do_not_count() -> None:
    now = 0.0
    pace = RoundTimes(lambda: now)
    waited = 0.0
    for round in range(1, 20):
        pace.push(round, waited)
        now += 0.5
        pace.push(round, waited)
        now, waited = now + 2.5, waited + 2.0
    assert pace.seconds is not None
    assert abs(pace.seconds - 1.0) < 1e-9
    assert pace.rounds == 19 - WARM_UP


def test_nothing_is_known_before_the_first_measured_round() -> None:
    pace = RoundTimes()
    pace.push(1, 0.0)
    assert pace.seconds is None


def test_step_that_takes_longer_than_usual_shows_before_it_ends() -> None:
    now = 0.0
    pace = RoundTimes(lambda: now)
    assert pace.step_seconds(0.0) == 0.0
    for round in range(1, 20):
        pace.push(round, 0.0)
        now += 1.0
    now += 5.0
    assert pace.step_seconds(0.0) == 6.0
    assert pace.step_seconds(5.0) == 1.0, "it has waited"
    assert pace.step_seconds(None) == 1.0, "it is waiting"


def test_new_speed_is_shown_after_a_few_steps() -> None:
    now = 0.0
    pace = RoundTimes(lambda: now)
    for round in range(1, 40):
        now += 1.0 if round < 30 else 3.0
        pace.push(round, 0.0)
    assert pace.step_seconds(0.0) == 3.0


def test_steps_are_kept_with_their_samples_and_waits() -> None:
    now = 0.0
    pace = RoundTimes(lambda: now, keep=True)
    waited = 0.0
    for round in range(1, WARM_UP + 10):
        pace.push(round, waited, 32.0 if round < 9 else 8.0)
        now, waited = now + (2.5 if round < 8 else 1.0), waited + 0.5
    assert pace.steps[0] == (32.0, 2.0, 0.5)
    assert pace.steps[-1] == (8.0, 0.5, 0.5)
    assert len(pace.steps) == pace.rounds == 9
    assert pace.seconds == 2.0, "of a whole batch"


def test_spikes_are_counted_over_more_rounds_than_the_speed_is_measured_in() -> None:
    now = 0.0
    pace = RoundTimes(lambda: now)
    for round in range(1, 400):
        pace.push(round, 0.0)
        now += 5.0 if round % 20 == 0 else 1.0
    assert len(pace.steps) == 25
    assert pace.counted.steps == 150
    assert pace.counted.spikes in (7, 8)
    assert pace.counted.spike_factor == 5.0
