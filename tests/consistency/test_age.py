"""The age limit against the published methods, written down here as plain loops that share no code with the rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.consistency import Apply, Drop, Merge, Policy, Release
from paceline.testing import CheckedRule

#: (worker, round, version after the update that it is part of)
Applied = list[tuple[int, int, int]]


def ringmaster(order: Iterable[int], num_workers: int, threshold: int) -> Applied:
    """Ringmaster ASGD (Maranjyan, Tyurin and Richtarik, 2025; without calculation stops).

    A gradient with a delay of ``threshold`` or more is ignored; its worker begins again at the newest point.
    """
    k = 0
    delays, rounds = [0] * num_workers, [0] * num_workers
    applied: Applied = []
    for worker in order:
        rounds[worker] += 1
        if delays[worker] < threshold:
            k += 1
            applied.append((worker, rounds[worker], k))
            delays = [delay + 1 for delay in delays]
        delays[worker] = 0
    return applied


def rennala(order: Iterable[int], num_workers: int, batch: int) -> Applied:
    """Rennala SGD (Tyurin and Richtarik, 2023): a step with ``batch`` gradients, all computed at the newest point.

    Whoever delivers is sent the newest point: who delivers the last gradient of a batch, the one after the step.
    """
    arrivals = iter(order)
    newest, points, rounds = 0, [0] * num_workers, [0] * num_workers
    applied: Applied = []
    while True:
        gathered: list[tuple[int, int]] = []
        while len(gathered) < batch:
            worker = next(arrivals, None)
            if worker is None:
                return applied
            rounds[worker] += 1
            if points[worker] == newest:
                gathered.append((worker, rounds[worker]))
            points[worker] = newest
        newest += 1
        points[worker] = newest
        applied += [(*one, newest) for one in gathered]


def by_the_rule(policy: Policy, num_workers: int, order: Iterable[int]) -> tuple[Applied, CheckedRule]:
    """Push in an order; returns what was applied. Everybody is answered at once."""
    rule = CheckedRule(policy, num_workers)
    rounds = [0] * num_workers
    cohorts: dict[int, list[tuple[int, int]]] = {}
    applied: Applied = []
    for worker in order:
        rounds[worker] += 1
        first, *rest = rule.push(worker, rounds[worker])
        if isinstance(first, Merge):
            cohorts.setdefault(first.cohort, []).append((worker, rounds[worker]))
        else:
            assert first == Drop(worker, rule.version)
        for action in rest[:-1]:
            assert isinstance(action, Apply)
            applied += [(*one, action.version) for one in cohorts.pop(action.cohort)]
        assert rest[-1] == Release((worker,), rule.version)
    assert sum(rounds) == len(applied) + sum(map(len, cohorts.values())) + rule.stats.dropped.total()
    return applied, rule


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Workers and the order in which their gradients arrive, some workers much slower than others."""
    num_workers = draw(st.integers(1, 8))
    speeds = draw(st.lists(st.integers(1, 6), min_size=num_workers, max_size=num_workers))
    lots = [worker for worker, speed in enumerate(speeds) for _ in range(speed)]
    return num_workers, draw(st.lists(st.sampled_from(lots), max_size=120))


@settings(max_examples=150, deadline=None)
@given(orders(), st.integers(1, 12))
def test_each_with_an_age_is_ringmaster_asgd(arrivals: tuple[int, list[int]], threshold: int) -> None:
    num_workers, order = arrivals
    applied, rule = by_the_rule(Policy("each", age=threshold - 1), num_workers, order)
    assert applied == ringmaster(order, num_workers, threshold)
    assert rule.version == len(applied)


@settings(max_examples=150, deadline=None)
@given(orders(), st.integers(1, 20))
def test_first_k_with_age_zero_is_rennala_sgd(arrivals: tuple[int, list[int]], batch: int) -> None:
    num_workers, order = arrivals
    applied, rule = by_the_rule(Policy("first", first=batch, age=0), num_workers, order)
    assert applied == rennala(order, num_workers, batch)
    assert rule.version * batch == len(applied)
    assert set(rule.stats.staleness) <= {1}


@settings(max_examples=50, deadline=None)
@given(orders(), st.integers(1, 12))
def test_the_two_meet_at_batches_of_one(arrivals: tuple[int, list[int]], age: int) -> None:
    num_workers, order = arrivals
    one_by_one = by_the_rule(Policy("each", age=age), num_workers, order)[0]
    assert by_the_rule(Policy("first", first=1, age=age), num_workers, order)[0] == one_by_one


def in_turn(num_workers: int, pushes: int) -> Sequence[int]:
    return [number % num_workers for number in range(pushes)]


@pytest.mark.parametrize(
    ("policy", "updates", "dropped"),
    [
        (Policy("each", age=3), 2000, 2000),
        (Policy("first", first=1, age=3), 2000, 2000),
        (Policy("first", first=4, age=0), 364, 4000 - 4 * 364),
        (Policy("each", age=7), 4000, 0),
    ],
    ids=["ringmaster", "first of one", "rennala", "an age that all keep"],
)
def test_eight_workers_in_turn_are_not_starved(policy: Policy, updates: int, dropped: int) -> None:
    applied, rule = by_the_rule(policy, 8, in_turn(8, 4000))
    assert (rule.version, rule.stats.dropped.total()) == (updates, dropped)
    assert len(applied) == updates * max(1, policy.first)
