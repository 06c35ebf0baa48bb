"""Losses that grow with the batch are found, and noise is not taken for growth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from paceline.membership.loss_growth import LossGrowth

Sizes = Callable[[int, random.Random], list[int]]

SIZES: dict[str, Sizes] = {
    "3 and 6": lambda step, chance: [3, 6],
    "24 and 32": lambda step, chance: [24, 32],
    "of three workers": lambda step, chance: [chance.randint(4, 16) for _ in range(3)],
}


def said_after(sizes: Sizes, noise: float, power: float, seed: int, steps: int = 32) -> int:
    """Return the step in which growth is said, 0 if never; losses of samples are lognormal, and fall while training."""
    chance, growth = random.Random(seed), LossGrowth()
    for step in range(1, steps + 1):
        batches = {}
        for rank, size in enumerate(sizes(step, chance)):
            mean = sum(math.exp(chance.gauss(0, noise)) for _ in range(size)) / size * 0.97**step
            batches[rank] = (float(size), mean * size**power)
        if growth.note(batches):
            return step
    return 0


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_sums_are_found_within_the_first_steps_and_means_never(sizes: Sizes) -> None:
    assert all(0 < said_after(sizes, 0.3, 1.0, seed) <= 32 for seed in range(20))
    assert sum(said_after(sizes, 0.8, 1.0, seed) > 0 for seed in range(100)) >= 85
    assert not any(said_after(sizes, noise, 0.0, seed) for noise in (0.01, 0.3) for seed in range(100))
    assert sum(said_after(sizes, 0.8, 0.0, seed) > 0 for seed in range(100)) <= 1


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_losses_that_grow_otherwise_are_no_sums(power: float) -> None:
    assert not any(said_after(SIZES["3 and 6"], 0.1, power, seed) for seed in range(20))


def test_batches_of_like_size_tell_nothing() -> None:
    assert not said_after(lambda step, chance: [20, 24], 0.01, 1.0, 0)


def test_losses_that_are_zero_negative_or_endless_and_batches_without_samples_are_left_out() -> None:
    growth = LossGrowth()
    for loss in (0.0, -3.0, math.inf):
        assert growth.note({0: (3.0, 3.0), 1: (6.0, loss)}) == ""
    assert growth.note({0: (3.0, 3.0), 1: (0.0, 6.0)}) == ""
    assert growth.note({}) == ""
    found = [growth.note({0: (3.0, 3.0), 1: (6.0, 6.1 + step % 2 / 9)}) for step in range(14)]
    assert found == [""] * 13 + ["3 for 3 samples on worker 0 and 6.211 for 6 samples on worker 1"]
