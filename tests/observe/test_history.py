"""The usual times of the other workers: medians that are kept in order, whoever comes, goes, or changes its group."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median

import pytest

from paceline.observe.account import WORKER_PARTS, Steps
from paceline.observe.history import PARTS, USUAL, History, Ranking, Reference, mean_round


def worker(rank: int) -> History:
    return History(rank, f"h{rank}")


def step(one: History, random_: random.Random, rounds: int = 1) -> None:
    windows = []
    for _ in range(rounds):
        seconds = [random_.choice([0.0, 0.1, random_.random()]) for _ in WORKER_PARTS]
        windows.append(mean_round(Steps(1 + one.windows, 1, random_.choice([16.0, 32.0]), seconds)))
    one.add(windows)


def unlikely_small(noise: float, count: int) -> float:
    return math.sqrt((count * max(0.06, noise) ** 2 + 20 * 0.3**2) / (count + 20)) * (1 + 4 / count)


def by_sorting(others: Sequence[History]) -> Reference:
    """Return the same from nothing but the workers."""
    parts = range(len(PARTS))
    count = sum(len(one.rounds) for one in others)
    return Reference(
        [max(median(one.usual[part] for one in others), median(one.recent[part] for one in others)) for part in parts],
        [median(one.noise[part] for one in others) for part in parts],
        count,
        math.sqrt(math.pi / 2 / min(count, USUAL * len(others))),
        median(one.typical_s for one in others),
        median(one.rounds[-1].samples for one in others),
        max(one.typical_s for one in others),
        alone=False,
        behind=others,
    )


@pytest.mark.parametrize("seed", range(20))
def test_reference_is_that_of_the_others_whoever_steps_comes_or_goes(seed: int) -> None:
    random_ = random.Random(seed)
    everyone = [worker(rank) for rank in range(random_.randint(3, 9))]
    for one in everyone:
        step(one, random_, random_.randint(1, 50))
    groups, rankings = [everyone[:1], everyone[1:]], [Ranking(), Ranking()]
    for ranking, group in zip(rankings, groups, strict=True):
        for one in group:
            ranking.add(one)
    for turn in range(200):
        own = random_.randrange(2)
        if turn % 7 == 0 and len(groups[own]) > 2:  # to the other group, or away, and back as somebody new
            moved = groups[own].pop(random_.randrange(len(groups[own])))
            rankings[own].remove(moved)
            if turn % 3:
                moved = worker(moved.rank)
                step(moved, random_)
            new = random_.randrange(2)
            groups[new].append(moved)
            rankings[new].add(moved)
        one = random_.choice(groups[own])
        others = [other for other in groups[own] if other is not one]
        assert rankings[own].has_others(one) == bool(others)
        if others:
            reference = rankings[own].reference(one)
            assert reference == by_sorting(others)
            noise = unlikely_small(median(other.noise[3] for other in others), reference.count)
            assert reference.noise(3) == pytest.approx(noise)
            assert reference.means(0.1) == by_sorting(others).means(0.1)
            assert rankings[own].reference(worker(99)) == by_sorting(groups[own])
        step(one, random_)


def test_noise_follows_its_windows() -> None:
    one, random_ = worker(0), random.Random(1)
    step(one, random_, 40)
    noise = list(one.noise)
    for _ in range(40):
        step(one, random_)
    assert one.noise != noise
