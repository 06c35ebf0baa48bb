"""Counters of slots, and of their store."""

from __future__ import annotations

from paceline.consistency import Policy, Rule, Stats


def test_a_slot_has_counters_of_its_own_and_weightings_those_of_the_store() -> None:
    seen: list[tuple[int, float]] = []
    store = Stats()
    left = Rule(Policy("each"), 2, Stats(store=store))
    left._weight = lambda staleness, history: float(seen.append(history) or 1.0)
    left.push(0, 1, 3.0)
    right = left.copy()
    right._weight = left._weight
    left.push(0, 2)
    right.push(0, 2)
    assert left.stats == right.stats
    assert (left.stats.updates, left.stats.data_mass) == (2, {0: 4.0})
    assert seen == [(1, 1.0), (2, 2.0), (3, 3.0)]
    total = Stats()
    for one in (left, right):
        total.add(one.stats)
    assert (total.updates, total.weight_sum, total.staleness, total.data_mass) == (4, 4.0, {1: 4}, {0: 8.0})


def test_histogram_of_staleness_stays_small() -> None:
    stats = Stats()
    for staleness in range(1, 100_001):
        stats.seen(staleness)
    assert len(stats.staleness) < 500
    assert stats.staleness.total() == stats.updates == 100_000
    assert [stats.staleness[one] for one in (1, 63, 64, 65, 66)] == [1, 1, 2, 0, 2]
