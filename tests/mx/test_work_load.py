import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.mx.batch import WorkLoadPlanner, shares_to_sizes


def run(planner, batches, cost, batch_size=64, overhead=0.0, noise=0.0, seed=0):
    """Return the times of the slowest device, batch by batch, for devices that cost so much per sample."""
    chance, slowest = random.Random(seed), []
    for _ in range(batches):
        sizes = planner.sizes(batch_size)
        seconds = [
            (overhead + size * one) * chance.uniform(1, 1 + noise) for size, one in zip(sizes, cost, strict=True)
        ]
        planner.observe(sizes, seconds)
        slowest.append(max(seconds))
    return slowest


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 500))
def test_sizes_cover_the_batch_and_every_device_works(shares, extra):
    sizes = shares_to_sizes(len(shares) + extra, shares)
    assert sum(sizes) == len(shares) + extra
    assert min(sizes) >= 1


def test_sizes_follow_the_shares():
    assert shares_to_sizes(64, [3, 1]) == [48, 16]
    assert shares_to_sizes(10, [1, 1, 2]) == [3, 2, 5]


def test_fewer_samples_than_devices_are_refused():
    with pytest.raises(ValueError, match="2 samples cannot feed 3 devices"):
        WorkLoadPlanner(3).sizes(2)


@pytest.mark.parametrize("cost", [[1, 3], [3, 1], [1, 3, 1], [1, 2, 3, 8]])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_split_settles_near_the_ideal_within_fifty_batches(cost, noise):
    planner = WorkLoadPlanner(len(cost))
    run(planner, 50, cost, noise=noise)
    total = sum(1 / one for one in cost)
    for share, one in zip(planner.shares, cost, strict=True):
        assert share == pytest.approx(1 / one / total, rel=0.15)


def test_uneven_devices_finish_together_even_with_a_fixed_cost_per_batch():
    planner = WorkLoadPlanner(2)
    run(planner, 50, [1e-3, 3e-3], batch_size=256, overhead=0.01)
    first, second = planner.sizes(256)
    assert 0.01 + first * 1e-3 == pytest.approx(0.01 + second * 3e-3, rel=0.05)


def test_epoch_gets_at_least_half_again_as_fast():
    even = sum(32 * 3.0 for _ in range(50))
    assert even / sum(run(WorkLoadPlanner(2), 50, [1.0, 3.0], noise=0.1)) > 1.5


def test_split_follows_a_device_that_slows_down_later():
    planner = WorkLoadPlanner(2)
    run(planner, 50, [1, 1])
    assert planner.shares == (0.5, 0.5)
    run(planner, 15, [1, 3])
    assert planner.shares[0] == pytest.approx(0.75, rel=0.05)


def test_hiccups_and_small_noise_change_nothing():
    planner = WorkLoadPlanner(2)
    run(planner, 5, [1, 1])
    planner.observe([32, 32], [32, 3200])
    run(planner, 3, [1, 1])
    assert planner.shares == (0.5, 0.5)
    run(planner, 100, [1, 1], noise=0.02)
    assert planner.shares == (0.5, 0.5)


def test_first_batch_does_not_count():
    planner = WorkLoadPlanner(2)
    planner.observe([32, 32], [5.0, 0.1])
    assert planner.shares == (0.5, 0.5)
