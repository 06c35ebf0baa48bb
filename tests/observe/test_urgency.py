"""When a heartbeat is due before its time."""

from __future__ import annotations

import random

import pytest

from paceline.observe.urgency import APART_S, BEATS, EACH_S, Urgency

ROUND_S = 0.2


def beats(urgency: Urgency, start: float, rounds: list[float]) -> list[int]:
    """Return the rounds after which a heartbeat is due."""
    return [index for index, seconds in enumerate(rounds) if urgency.note(start + index * ROUND_S, seconds)]


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_first_rounds_that_are_much_longer_are_told_one_by_one(jitter: float) -> None:
    urgency, chance = Urgency(), random.Random(1)
    usual = [ROUND_S * chance.lognormvariate(0, jitter) for _ in range(40)]
    assert beats(urgency, 0.0, usual) == []
    assert beats(urgency, 8.0, [3 * one for one in usual])[:4] == [0, 1, 2, 3]


def test_rounds_that_are_a_little_longer_are_told_after_some_of_them() -> None:
    urgency = Urgency()
    assert beats(urgency, 0.0, [ROUND_S] * 40) == []
    assert 0 < beats(urgency, 8.0, [1.2 * ROUND_S] * 10)[0] <= 5


def test_another_figure_tells_where_the_rounds_are_as_long() -> None:
    urgency = Urgency(2)
    assert not any(urgency.note(0.2 * index, 0.2, 0.002) for index in range(30))
    assert urgency.note(6.0, 0.2, 0.06)


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3, 1.0])
def test_no_job_costs_more_heartbeats_than_the_few_that_are_free(jitter: float) -> None:
    urgency, chance = Urgency(), random.Random(2)
    rounds = [ROUND_S * chance.lognormvariate(0, jitter) * (5 if index % 7 < 3 else 1) for index in range(2000)]
    assert len(beats(urgency, 0.0, rounds)) <= BEATS + 2000 * ROUND_S / EACH_S


def test_two_heartbeats_are_apart() -> None:
    urgency = Urgency()
    for index in range(40):
        urgency.note(0.01 * index, 0.01)
    told = [index for index in range(40) if urgency.note(0.4 + 0.01 * index, 0.3)]
    assert len(told) > 1
    assert 0.01 * (told[1] - told[0]) >= 0.99 * APART_S


def test_usual_rounds_cost_hardly_a_heartbeat() -> None:
    for seed in range(5):
        urgency, chance = Urgency(3), random.Random(seed)
        rounds = [ROUND_S * chance.lognormvariate(0, 0.3) for _ in range(1000)]
        told = [index for index, one in enumerate(rounds) if urgency.note(ROUND_S * index, one, 0.002, 0.0)]
        assert len(told) < 20
