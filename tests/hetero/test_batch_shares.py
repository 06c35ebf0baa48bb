"""Shares of the global batch by measured speed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.hetero import Shares, Speed, SpeedMeter, fastest_split, split_evenly, step_seconds
from paceline.hetero.batch_shares import columns_of

speeds = st.builds(Speed, st.floats(0, 0.1), st.floats(1e-4, 0.1))


@given(st.integers(0, 500), st.lists(st.floats(0.01, 10), min_size=1, max_size=9))
def test_even_split_is_exact_and_within_one(total: int, weights: list[float]) -> None:
    parts = split_evenly(total, weights)
    assert sum(parts) == total
    assert all(abs(part - total * weight / sum(weights)) < 1 for part, weight in zip(parts, weights, strict=True))


@settings(deadline=None)
@given(st.integers(3, 16), st.lists(speeds, min_size=3, max_size=3), st.sampled_from([(), (4, None, 2), (1, 1, 1)]))
def test_fastest_split_is_as_fast_as_the_best_of_all(
    total: int, machines: list[Speed], caps: tuple[int | None, ...]
) -> None:
    parts = fastest_split(total, machines, caps)
    assert sum(parts) == total
    assert min(parts) >= 1
    others = [(a, b, total - a - b) for a, b in itertools.product(range(1, total), repeat=2) if a + b < total]
    best = min(step_seconds(one, machines, caps) for one in others)
    # With passes, time jumps at each limit, and single samples at the end may cross one.
    slack = 1e-6 if not caps else max(machine.seconds(2) for machine in machines)
    assert step_seconds(parts, machines, caps) <= best + slack


def test_global_batch_too_small_for_the_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for 3 workers"):
        fastest_split(2, [Speed(0, 1)] * 3)
    with pytest.raises(ValueError, match="too small for 3 workers"):
        Shares(2, [1, 1, 1])


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0]])
def test_weights_that_divide_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        split_evenly(4, weights)


class Team:
    """Workers with true speeds, whose steps are measured with noise."""

    def __init__(self, truth: list[Speed], batch: int, seed: int, noise: float = 0.1) -> None:
        self.truth, self.shares, self.noise = truth, Shares(batch, [1.0] * len(truth)), noise
        self.meters = [SpeedMeter() for _ in truth]
        self.rng = np.random.default_rng(seed)

    def round(self) -> None:
        for worker, samples in self.shares.samples.items():
            seconds = self.truth[worker].seconds(samples) * float(self.rng.lognormal(0, self.noise))
            self.meters[worker].add(samples, seconds)
        fits = {worker: self.meters[worker].speed() for worker in self.shares.samples}
        self.shares.revise({worker: fit for worker, fit in fits.items() if fit is not None})
        self.shares.check()

    def part_of_limit(self) -> float:
        """The possible time of a step, as part of the time with these shares."""
        live = [self.truth[worker] for worker in self.shares.samples]
        limit = step_seconds(fastest_split(self.shares.global_batch, live), live)
        return limit / step_seconds(list(self.shares.samples.values()), live)


def six(fixed: float) -> list[Speed]:
    """Batches of 16 in 60, 60, 120, 120, 240 and 240 ms, of which a part is fixed."""
    return [Speed(fixed * t, (1 - fixed) * t / 16) for t in (0.06, 0.06, 0.12, 0.12, 0.24, 0.24)]


@pytest.mark.parametrize("fixed", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_measured_shares_reach_the_limit_within_ten_rounds(fixed: float, noise: float) -> None:
    for seed in range(20):
        team = Team(six(fixed), 96, seed, noise)
        for _ in range(10):
            team.round()
        assert team.part_of_limit() >= 0.95


@pytest.mark.parametrize("fixed", [0.0, 0.2])
def test_measured_shares_under_ten_per_cent_of_noise(fixed: float) -> None:
    """One run may be off by what ten noisy steps leave open; the typical one is not."""
    parts = []
    for seed in range(40):
        team = Team(six(fixed), 960, seed)
        for _ in range(10):
            team.round()
        parts.append(team.part_of_limit())
    assert np.median(parts) >= 0.9
    assert min(parts) >= 0.75


def test_worker_that_becomes_half_as_fast_is_followed_within_ten_rounds() -> None:
    for seed in range(20):
        team = Team(six(0.2), 96, seed, noise=0.02)
        for _ in range(30):
            team.round()
        team.truth[seed % 6] = team.truth[seed % 6].times(2)
        assert team.part_of_limit() < 0.8
        for _ in range(10):
            team.round()
        assert team.part_of_limit() >= 0.95


def test_hysteresis_keeps_shares_that_are_good_enough() -> None:
    team, changes = Team(six(0.2), 96, seed=0, noise=0.02), 0
    for round in range(200):
        before = dict(team.shares.samples)
        team.round()
        changes += round >= 20 and before != team.shares.samples
    assert changes <= 20


def test_share_of_a_dead_worker_goes_to_the_others() -> None:
    shares = Shares(12, [1, 1, 2])
    shares.leave(2)
    shares.leave(2)
    assert shares.samples == {0: 6, 1: 6}
    assert not shares.revise({0: Speed(0, 1)})
    assert shares.revise({1: Speed(0, 2)})
    assert shares.samples == {0: 8, 1: 4}
    assert columns_of(shares.samples, 12)[1] == (8, 12)
    shares.leave(0)
    assert shares.samples == {1: 12}
    with pytest.raises(ValueError, match="last one"):
        shares.leave(1)


def test_a_least_part_is_taken_from_the_largest_where_there_is_as_much_for_each() -> None:
    assert columns_of({0: 1, 1: 9, 2: 2}, 12, 2) == {0: (0, 2), 1: (2, 10), 2: (10, 12)}
    assert columns_of({0: 1, 1: 9, 2: 2}, 5, 2) == {0: (0, 1), 1: (1, 4), 2: (4, 5)}


def test_memory_limit_is_kept_by_accumulation() -> None:
    shares = Shares(64, [1, 1], max_batch=[None, 10])
    shares.revise({0: Speed(0.0, 3.0), 1: Speed(0.0, 1.0)})
    assert shares.samples == {0: 16, 1: 48}
