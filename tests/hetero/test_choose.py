"""The choice of a way to synchronise, and its forecasts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from paceline.hetero import Measured, Speed, StepNoise, WorkerRound, choose, measured_of
from paceline.hetero.forecast import first_k, in_groups, lock_step
from paceline.hetero.measured import sizes

BATCH = 32


def machines(*seconds: float, **more: object) -> Measured:
    """Workers whose step of 32 takes so long, a fifth of it fixed."""
    noise = StepNoise(0.1)
    speeds = tuple(Speed(0.2 * one, 0.8 * one / BATCH) for one in seconds)
    return Measured(**({"workers": speeds, "batch": BATCH, "noise": noise} | more))  # type: ignore[arg-type]


ALIKE = machines(*[1.0] * 12)
CLASSES = machines(*[1.0] * 4, *[2.0] * 4, *[4.0] * 4)
STRAGGLER = machines(*[1.0] * 11, 8.0)
SPIKES = dataclasses.replace(CLASSES, noise=StepNoise(0.1, 0.05, 8.0))


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_machines_that_are_alike_stay_in_lock_step() -> None:
    choice = choose(ALIKE)
    assert (choice.store_type, choice.shares) == ("dist_sync", "equal")
    assert "all 12 workers are alike (1 to 1 s per step, jitter 10%, 0 s per exchange)" in choice.sentence


def test_spikes_end_lock_step() -> None:
    choice = choose(SPIKES)
    assert (choice.store_type, choice.shares, choice.policy.lr_scale) == ("dist_async", "pool", "sample")
    assert "5.0% of steps take 8 times as long" in choice.sentence


def test_a_straggler_with_a_fixed_time_gets_no_tiny_batch() -> None:
    """Its fixed time alone is 1.6 s: with batches by speed all would wait for that."""
    choice = choose(STRAGGLER)
    assert (choice.store_type, choice.shares) == ("dist_async", "pool")
    assert "worker 11 takes up to 8 times as long as the fastest" in choice.sentence


def test_without_common_data_there_are_no_batches_by_speed_and_no_weighting() -> None:
    for measured in (CLASSES, STRAGGLER, SPIKES):
        choice = choose(dataclasses.replace(measured, hands_out=False))
        assert choice.shares == "equal"
        assert choice.policy.weighting == "none"


def test_busy_optimizer_makes_updates_rare() -> None:
    """Workers make five pushes a second, and servers two updates."""
    busy = dataclasses.replace(SPIKES, update_s=4 / 7, exchange_s=4 / 7)
    few, many = (first_k(busy, first) for first in (1, 6))
    assert few.samples_per_s < 0.7 * many.samples_per_s
    assert choose(busy).policy.first > choose(SPIKES).policy.first


def test_one_worker_needs_no_choice() -> None:
    assert choose(machines(1.0)).words == "dist_sync with equal batches"


def test_sentence_has_the_rates_of_all_ways() -> None:
    text = choose(SPIKES).sentence
    assert text.startswith(choose(SPIKES).words)
    for words in ("dist_sync with equal batches", "dist_sync with batches by speed", "dist_gsync with 3 groups"):
        assert f"samples/s with {words}" in text or f"samples/s (stale ones count 0.92) with {words}" in text


# ---- forecasts, by hand and by trial ---------------------------------------------------------------------------------


def test_forecasts_by_hand() -> None:
    quiet = dataclasses.replace(machines(1.0, 1.0, 2.0), noise=StepNoise(), exchange_s=0.5, update_s=0.2)
    assert quiet.push_s == pytest.approx(0.1)
    assert lock_step(quiet, by_speed=False).samples_per_s == pytest.approx(96 / 2.5)
    grouped = in_groups(dataclasses.replace(quiet, update_s=0.0), ((0, 1), (2,)))
    push_s = 0.5 / 3
    free = 2 / (1 + 2 * push_s) + 1 / (2 + push_s)
    assert 0.98 * BATCH * free < grouped.samples_per_s <= BATCH * free
    assert first_k(quiet, 1).samples_per_s < BATCH * 3 / (3 * 0.2)


@pytest.mark.parametrize("noise", [StepNoise(0.1), StepNoise(0.3, 0.05, 8.0), StepNoise(0.0, 0.1, 5.0)])
def test_slowest_of_several_steps_is_that_of_a_trial(noise: StepNoise) -> None:
    rng = np.random.default_rng(0)
    times = np.array([1.0] * 4 + [2.0] * 4)
    steps = times * rng.lognormal(0, noise.jitter, (100_000, 8))
    steps = np.where(rng.random(steps.shape) < noise.spike_share, noise.spike_factor * steps, steps)
    assert noise.slowest(times.tolist()) == pytest.approx(steps.max(1).mean(), rel=0.01)
    assert noise.slowest([1.0]) == pytest.approx(steps[:, :4].mean(), rel=0.01)


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_noise_and_speeds_come_back_from_steps() -> None:
    rng = np.random.default_rng(1)
    found = []
    for speed in CLASSES.workers:
        steps = []
        for size in sizes(BATCH, 200):
            seconds = speed.seconds(size) * rng.lognormal(0, 0.1) * (8.0 if rng.random() < 0.05 else 1.0)
            steps.append(WorkerRound(size, seconds, 0.3 + rng.random()))
        found.append(steps)
    measured = measured_of(found, BATCH, update_s=0.1)
    assert measured.seconds == pytest.approx(CLASSES.seconds, rel=0.1)
    assert [one.fixed_s for one in measured.workers] == pytest.approx([s.fixed_s for s in CLASSES.workers], rel=0.4)
    assert measured.noise.jitter == pytest.approx(0.1, abs=0.02)
    assert measured.noise.spike_share == pytest.approx(0.05, abs=0.02)
    assert measured.noise.spike_factor == pytest.approx(8.0, rel=0.1)
    assert 0.3 < measured.exchange_s < 0.45


def test_work_after_a_push_does_not_count_for_the_next_size() -> None:
    """The first small step takes as long as a whole one; it must not look like a change of speed."""
    steps = [WorkerRound(8, 0.3, 0.0)] * 12 + [WorkerRound(2, 0.3, 0.0)] + [WorkerRound(2, 0.12, 0.0)] * 11
    measured = measured_of([steps, steps], 8)
    assert measured.seconds == pytest.approx([0.3, 0.3])
    assert [one.fixed_s for one in measured.workers] == pytest.approx([0.06, 0.06])
    assert measured.noise == StepNoise()


def test_one_pause_is_no_spike() -> None:
    assert StepNoise.of([1.0] * 200 + [50.0]) == StepNoise()
    assert StepNoise.of([1.0] * 200 + [5.0] * 10).spike_factor == 5.0


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no steps"):
        measured_of([[WorkerRound(1, 1.0, 0.0)], []], 1)
    with pytest.raises(ValueError, match="no steps"):
        StepNoise.of([])


def test_mean_of_noise_is_that_of_its_parts() -> None:
    assert StepNoise(0.0, 0.1, 5.0).mean == pytest.approx(1.4)
    assert StepNoise(0.2).mean == pytest.approx(math.exp(0.02))
