"""The usual times of the other workers: medians that are kept in order, whoever comes, goes, or changes its group."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

import pytest

from paceline.observe.account import WORKER_PARTS
from paceline.observe.history import PARTS, USUAL, History, Reference, mean_round, of_others


def worker(rank: int) -> History:
    return History(rank, f"h{rank}")


def step(one: History, random_: random.Random, rounds: int = 1) -> None:
    windows = []
    for _ in range(rounds):
        seconds = [random_.choice([0.0, 0.1, random_.random()]) for _ in WORKER_PARTS]
        windows.append(mean_round(1 + one.windows, 1, random_.choice([16.0, 32.0]), seconds))
    one.add(windows)


def by_sorting(others: Sequence[History]) -> Reference:
    """Return the same from nothing but the workers."""
    parts = range(len(PARTS))
    count = sum(min(USUAL, len(one.rounds)) for one in others)
    return Reference(
        [max(median(one.usual[part] for one in others), median(one.recent[part] for one in others)) for part in parts],
        [max(0.06, median(one.noise[part] for one in others)) * (1 + 4 / count) for part in parts],
        median(one.typical_s for one in others),
        median(one.rounds[-1].samples for one in others),
        max(one.typical_s for one in others),
        alone=False,
        rounds=[one.rounds for one in others],
    )


@pytest.mark.parametrize("seed", range(20))
def test_reference_is_that_of_the_others_whoever_steps_comes_or_goes(seed: int) -> None:
    random_ = random.Random(seed)
    everyone = [worker(rank) for rank in range(random_.randint(3, 9))]
    for one in everyone:
        step(one, random_, random_.randint(1, 50))
    groups = [everyone[:1], everyone[1:]]
    for turn in range(200):
        own = random_.randrange(2)
        if turn % 7 == 0 and len(groups[own]) > 2:  # to the other group, or away, and back as somebody new
            moved = groups[own].pop(random_.randrange(len(groups[own])))
            if turn % 3:
                moved = worker(moved.rank)
                step(moved, random_)
            groups[random_.randrange(2)].append(moved)
        one = random_.choice(groups[own])
        others = [other for other in groups[own] if other is not one]
        if others:
            assert of_others(others) == by_sorting(others)
        step(one, random_)


def test_noise_follows_its_windows() -> None:
    one, random_ = worker(0), random.Random(1)
    step(one, random_, 40)
    noise = list(one.noise)
    for _ in range(40):
        step(one, random_)
    assert one.noise != noise
