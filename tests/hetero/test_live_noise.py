"""Noise is counted while a job trains, and believed only where chance would hardly make the difference."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.hetero import StepNoise
from paceline.hetero.step_noise import BLOCK, WINDOW, Counted, count, noise_now

#: As 12 workers measure it before a job.
STEPS = 24 * 12


def steps(chance: np.random.Generator, jitter: float, share: float, number: int = WINDOW) -> list[float]:
    usual = 0.3 * chance.lognormal(0, jitter, number)
    return np.where(chance.random(number) < share, 8 * usual, usual).tolist()  # type: ignore[no-any-return]


def test_few_steps_are_not_counted() -> None:
    assert count([0.1] * (3 * BLOCK - 1)) == Counted()
    assert count([0.1] * 3 * BLOCK) == Counted(BLOCK)


def test_spikes_and_jitter_are_counted_without_the_first_and_last() -> None:
    spike = [0.1] * 12 + [0.9] + [0.1] * 12
    assert count(spike * 8) == Counted(150, 6, pytest.approx(9.0))
    assert count([0.1] * 7 * BLOCK + [0.9] * BLOCK) == Counted(150)
    chance = np.random.default_rng(0)
    many = [count(steps(chance, 0.2, 0.05)) for _ in range(200)]
    assert np.mean([one.jitter for one in many]) == pytest.approx(0.2, rel=0.05)
    assert np.mean([one.spikes / one.steps for one in many]) == pytest.approx(0.05, rel=0.1)
    assert np.mean([one.spike_factor for one in many]) == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize("at", range(0, WINDOW, 9))
@pytest.mark.parametrize("seconds", [0.01, 1.0])
def test_change_of_speed_is_no_spike(seconds: float, at: int) -> None:
    counted = count([0.1] * at + [seconds] * (WINDOW - at))
    assert (counted.spikes, counted.jitter) == (0, 0.0)


def test_what_was_measured_stays_until_there_is_a_clear_difference() -> None:
    start = StepNoise(0.1, 0.05, 8.0)
    assert noise_now(start, STEPS, [Counted()] * 12) == start
    chance = np.random.default_rng(1)
    for _ in range(500):
        found = [count(steps(chance, 0.1, 0.05)) for _ in range(12)]
        assert noise_now(start, STEPS, found) == start


def test_spikes_that_begin_and_end_and_more_jitter_are_believed() -> None:
    chance = np.random.default_rng(2)
    calm, rough = ([count(steps(chance, 0.1 + share, share)) for _ in range(12)] for share in (0.0, 0.05))
    now = noise_now(StepNoise(0.1), STEPS, rough)
    assert (now.spike_share, now.spike_factor) == (pytest.approx(0.05, rel=0.3), pytest.approx(8, rel=0.1))
    assert now.jitter == pytest.approx(0.15, rel=0.1)
    assert noise_now(StepNoise(0.1, 0.05, 8.0), STEPS, calm) == StepNoise(0.1)
