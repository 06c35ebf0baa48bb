"""Speeds fitted from noisy steps."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.hetero import Speed, SpeedMeter


def measured(meter: SpeedMeter, speed: Speed, sizes: list[int], rng: np.random.Generator, noise: float = 0.1) -> None:
    for size in sizes:
        meter.add(size, speed.seconds(size) * float(rng.lognormal(0, noise)))


@pytest.mark.parametrize(("window", "steps"), [(25, 4), (25, 25), (25, 60), (60, 60)])
def test_fixed_time_and_time_per_sample_are_told_apart(window: int, steps: int) -> None:
    meter = SpeedMeter(window)
    measured(meter, Speed(0.02, 0.005), ([16, 32, 8, 24, 40] * 12)[:steps], np.random.default_rng(0), noise=0)
    fit = meter.speed()
    assert fit is not None
    assert fit.fixed_s == pytest.approx(0.02)
    assert fit.per_sample_s == pytest.approx(0.005)


def test_one_size_counts_as_proportional() -> None:
    meter = SpeedMeter()
    meter.add(16, 0.32)
    assert meter.speed() == Speed(0.0, 0.02)


def test_median_ignores_a_fifth_of_outliers() -> None:
    rng = np.random.default_rng(1)
    meter = SpeedMeter()
    for step in range(25):
        meter.add(16, 0.1 * float(rng.lognormal(0, 0.05)) * (8 if step % 5 == 0 else 1))
    fit = meter.speed()
    assert fit is not None
    assert fit.seconds(16) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_prediction_under_noise_is_close(seed: int) -> None:
    rng = np.random.default_rng(seed)
    meter, truth = SpeedMeter(), Speed(0.03, 0.002)
    measured(meter, truth, [int(size) for size in rng.integers(10, 60, 25)], rng)
    fit = meter.speed()
    assert fit is not None
    assert fit.seconds(30) == pytest.approx(truth.seconds(30), rel=0.15)
    assert [fit.seconds(n) for n in (10, 60)] == pytest.approx([truth.seconds(n) for n in (10, 60)], rel=0.2)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_change_of_speed_is_followed_in_three_steps_and_keeps_the_shape(factor: float) -> None:
    meter, truth = SpeedMeter(), Speed(0.03, 0.002)
    rng = np.random.default_rng(2)
    measured(meter, truth, [10, 60] * 10, rng, noise=0.02)
    measured(meter, truth.times(factor), [30, 20, 40], rng, noise=0.02)
    fit = meter.speed()
    assert fit is not None
    for n in (10, 30, 60):
        assert fit.seconds(n) == pytest.approx(factor * truth.seconds(n), rel=0.1)


def test_other_size_is_no_change_of_speed() -> None:
    """With a large fixed time, half the samples take far more than half the time: the worker is not slower."""
    meter, truth = SpeedMeter(), Speed(0.1, 0.001)
    rng = np.random.default_rng(3)
    measured(meter, truth, [64] * 10 + [16] * 3, rng, noise=0)
    fit = meter.speed()
    assert fit is not None
    assert fit.seconds(64) == pytest.approx(truth.seconds(64), rel=0.01)


def test_constant_time_is_not_an_infinite_batch() -> None:
    meter = SpeedMeter()
    measured(meter, Speed(0.1, 0.0), [8, 64, 16, 32] * 3, np.random.default_rng(4), noise=0)
    fit = meter.speed()
    assert fit is not None
    assert 64 < fit.samples_within(0.2) < 1000


def test_steady_worker_under_noise_is_not_called_slower() -> None:
    rng = np.random.default_rng(5)
    meter, fits = SpeedMeter(), []
    for step in range(1000):
        measured(meter, Speed(0.0, 0.01), [16], rng)
        fit = meter.speed()
        assert fit is not None
        fits += [fit.seconds(16)] if step > 25 else []
    assert 0.16 / 1.15 < min(fits) < max(fits) < 0.16 * 1.15


def test_memory_limit_makes_several_passes() -> None:
    speed = Speed(0.1, 0.01)
    assert speed.seconds(64, max_batch=32) == pytest.approx(0.84)
    assert speed.seconds(0) == 0
    assert [speed.samples_within(t, 32) for t in (0.05, 0.42, 0.43, 0.84, 1.0)] == [0, 32, 32, 64, 70]
    assert all(speed.seconds(speed.samples_within(t, 32), 32) <= t + 1e-9 for t in (0.05, 0.42, 0.43, 0.84, 1.0))


@pytest.mark.parametrize(("samples", "seconds"), [(0, 1.0), (1, 0.0)])
def test_measurement_without_samples_or_time_is_refused(samples: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="both must be positive"):
        SpeedMeter().add(samples, seconds)
    assert SpeedMeter().speed() is None
