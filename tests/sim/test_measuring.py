"""What a simulated job measures, and what its workers learn from."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.hetero import Speed
from paceline.sim import SimulatedCluster, SimulatedWorker
from paceline.sim.problem import OwnData
from paceline.sim.simulation import measure

CLASSES = tuple(SimulatedWorker(Speed(0.2 * one, 0.8 * one / 32)) for one in (1.0, 1.0, 2.0, 4.0))


def test_measurement_finds_what_the_cluster_is_like() -> None:
    cluster = SimulatedCluster(CLASSES, jitter=0.1, update_s=0.3, bandwidth=1.0, model_bytes=0.05)
    measured, seconds = measure(cluster)
    assert measured.seconds == pytest.approx([1.0, 1.0, 2.0, 4.0], rel=0.1)
    assert [one.fixed_s for one in measured.workers] == pytest.approx([0.2, 0.2, 0.4, 0.8], rel=0.3)
    assert measured.noise.jitter == pytest.approx(0.1, abs=0.03)
    assert measured.noise.spike_share == 0
    assert 0.3 + 2 * 0.05 <= measured.exchange_s <= 0.3 + 8 * 0.05
    assert 12 * (4.0 + 1.6) < seconds < 1.3 * 12 * (4.0 + 1.6)


def test_spikes_are_found() -> None:
    noise = measure(SimulatedCluster(CLASSES * 3, jitter=0.1, spike_probability=0.05, spike_factor=8.0))[0].noise
    assert noise.spike_share == pytest.approx(0.05, abs=0.03)
    assert noise.spike_factor == pytest.approx(8.0, rel=0.2)


def test_skewed_parts_have_few_classes_and_all_samples() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    even, skewed = (OwnData(1000, [1.0] * 5, 0, labels, skew) for skew in (0.0, 0.8))
    taken = [[source.next(worker, 200) for worker in range(5)] for source in (even, skewed)]
    for parts in taken:
        assert sorted(np.concatenate(parts)) == list(range(1000))
    largest = [max(np.bincount(labels[part]).max() for part in parts) for parts in taken]
    assert largest[0] < 50 < 80 < largest[1]
