"""How long this worker computes in a round."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.hetero.files import parse_report
from paceline.observe.account import COMPUTE, WAIT, WORKER_PARTS, Steps
from paceline.worker.profile import Profile
from paceline.worker.round_times import WARM_UP, RoundTimes
from paceline.worker.training_kind import TrainingKind


def steps(round: int, computed: float, waited: float = 0.0, samples: float = 1.0) -> Steps:
    seconds = [0.0] * len(WORKER_PARTS)
    seconds[COMPUTE], seconds[WAIT] = computed, waited
    return Steps(round, 1, samples, seconds)


def test_waits_do_not_count() -> None:
    pace = RoundTimes()
    for round in range(2, 20):
        pace.add(steps(round, 1.0, 2.0))
    assert pace.seconds is not None
    assert abs(pace.seconds - 1.0) < 1e-9
    assert pace.rounds == 19 - WARM_UP


def test_nothing_is_known_before_the_first_measured_round() -> None:
    pace = RoundTimes()
    pace.add(steps(WARM_UP, 1.0))
    assert pace.seconds is None


def test_step_that_takes_longer_than_usual_shows_before_it_ends() -> None:
    pace = RoundTimes()
    assert pace.step_seconds(0.0) == 0.0
    for round in range(1, 20):
        pace.add(steps(round, 1.0))
    assert pace.step_seconds(6.0) == 6.0
    assert pace.step_seconds(0.5) == 1.0
    assert pace.step_seconds(None) == 1.0, "it is waiting"


def test_mean_step_of_the_last_period_counts_and_that_of_the_present_one_if_it_is_longer() -> None:
    pace = RoundTimes()
    assert pace.step_seconds(9.0, WARM_UP) == 0.0
    assert pace.step_seconds(8.0, WARM_UP + 1) == 2.0, "the first period"
    for seconds in (32.0, 16.0):
        pace.add(replace(steps(1, seconds, 8.0, 64.0), steps=8))
    assert pace.steps == ((8.0, 4.0, 1.0), (8.0, 2.0, 1.0))
    assert pace.step_seconds(None, 3) == pace.step_seconds(8.0, 3) == 2.0
    assert pace.step_seconds(12.0, 3) == 3.0


def test_new_speed_is_shown_after_a_few_steps() -> None:
    pace = RoundTimes()
    for round in range(1, 40):
        pace.add(steps(round, 1.0 if round < 30 else 3.0))
    assert pace.step_seconds(0.0) == 3.0


def test_steps_are_kept_with_their_samples_and_waits() -> None:
    pace = RoundTimes(keep=True)
    for round in range(2, WARM_UP + 10):
        pace.add(steps(round, 2.0 if round < 9 else 0.5, 0.5, 32.0 if round < 9 else 8.0))
    assert pace.steps[0] == (32.0, 2.0, 0.5)
    assert pace.steps[-1] == (8.0, 0.5, 0.5)
    assert len(pace.steps) == pace.rounds == 9
    assert pace.seconds == 2.0, "of a whole batch"


def test_spikes_are_counted_over_more_rounds_than_the_speed_is_measured_in() -> None:
    pace = RoundTimes()
    for round in range(1, 400):
        pace.add(steps(round, 5.0 if round % 20 == 0 else 1.0))
    assert len(pace.steps) == 25
    assert pace.counted.steps == 150
    assert pace.counted.spikes in (7, 8)
    assert pace.counted.spike_factor == 5.0


def test_profile_without_a_file_prints_all_steps(capsys: pytest.CaptureFixture[str]) -> None:
    pace = RoundTimes(keep=True)
    for round in range(2, WARM_UP + 4):
        pace.add(steps(round, 1.0, 0.5, 32.0))
    me = SimpleNamespace(host="10.0.0.1", local_rank=0)
    settings = SimpleNamespace(profile="-", profile_rounds=4, profile_steps="")
    session = SimpleNamespace(
        settings=settings, pace=pace, rank=0, workers=[me], servers=[], kind=TrainingKind(store_type="dist_async"),
        stores=SimpleNamespace(pause=lambda: None, elements=77), gather=lambda name, payload: [payload],
    )  # fmt: skip
    Profile(session).check()  # one round is missing
    assert capsys.readouterr().out == ""
    settings.profile_rounds = 3
    with pytest.raises(SystemExit) as end:
        Profile(session).check()
    assert end.value.code == 0
    found = parse_report(capsys.readouterr().out)
    assert found is not None
    assert (found.names, found.elements, found.store_type) == (("10.0.0.1:0",), 77, "dist_async")
    assert found.steps == (((32.0, 1.0, 0.5),) * 3,)
