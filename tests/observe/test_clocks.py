"""Clocks are aligned from round trips, with a bound of the error that holds."""

from __future__ import annotations

import math
import random

import pytest

from paceline.observe.clocks import DRIFT, TURNS, RoundTrips


@pytest.mark.parametrize("seed", range(20))
def test_error_holds_whichever_way_is_slow(seed: int) -> None:
    chance = random.Random(seed)
    clock, truth, now = RoundTrips(), chance.uniform(-1e5, 1e5), 0.0
    drift = chance.uniform(-DRIFT, DRIFT)
    assert clock.error(now) == math.inf
    for _ in range(200):
        there_s, back_s = chance.expovariate(1e3), chance.expovariate(1e2)
        sent, now = now, now + there_s + back_s
        clock.note(sent, sent + there_s + truth + drift * (sent + there_s), now)
        assert abs(clock.offset - (truth + drift * now)) <= clock.error(now) + 1e-9
        now += 0.5
    assert clock.error(now) < 0.02


def test_shortest_round_trip_counts_until_it_is_old() -> None:
    clock = RoundTrips()
    clock.note(0.0, 100.0, 0.001)
    clock.note(1.0, 105.0, 1.1)
    assert clock.offset == pytest.approx(99.9995)
    clock.note(400.0, 505.0, 400.1)
    assert clock.offset == pytest.approx(104.95)


def test_processes_of_one_host_have_one_clock() -> None:
    clock = RoundTrips(is_same_clock=True)
    clock.note(1.0, 1.004, 1.005)
    assert (clock.offset, clock.error(50.0)) == (0.0, 0.0)


def test_clock_that_is_said_to_be_the_same_and_is_not_is_measured() -> None:
    clock = RoundTrips(is_same_clock=True)
    clock.note(1.0, 7.0, 1.5)
    assert (clock.offset, clock.error(1.5)) == (5.75, 0.25)


def test_ranks_take_turns_on_the_peers_clock() -> None:
    interval, found = 0.5, set()
    for rank in range(8):
        clock = RoundTrips()
        clock.note(1000.0 * rank, 7.0, 1000.0 * rank + 0.002)  # the clocks of hosts are apart
        due = clock.next_turn(1000.0 * rank + 0.002, interval, rank)
        found.add(round((due + clock.offset) % interval, 6))
    assert sorted(found) == [turn * interval / TURNS for turn in range(TURNS)]


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_an_interval_apart_however_late_one_is_taken(seed: int) -> None:
    chance = random.Random(seed)
    interval, rank, now = chance.uniform(0.05, 2), chance.randrange(100), chance.uniform(0, 1e6)
    clock = RoundTrips()
    clock.note(now, chance.uniform(-1e6, 1e6), now + 0.001)
    due = clock.next_turn(now, interval, rank)
    for _ in range(100):
        late_s = chance.choice([0.0, chance.uniform(0, 0.8), chance.uniform(0, 10)]) * interval
        later = clock.next_turn(due + late_s, interval, rank)
        assert interval / 8 - 1e-6 < later - (due + late_s) < interval * 9 / 8 + 1e-6
        turns = (later - due) / interval
        assert turns == pytest.approx(round(turns), abs=1e-6)
        due = later
