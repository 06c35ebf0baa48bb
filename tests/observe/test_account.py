"""The parts of a step sum up to its time."""

from __future__ import annotations

import random

import pytest

from paceline.observe.account import COMPUTE, DATA, GC, WAIT, WORKER_PARTS, Account, Steps, in_windows, joined


@pytest.mark.parametrize("seed", range(5))
def test_parts_sum_up_to_the_time_between_two_closes(seed: int) -> None:
    chance, now, begun = random.Random(seed), 100.0, 100.0
    account = Account(len(WORKER_PARTS), COMPUTE, now)
    stack: list[int] = []
    for _ in range(500):
        now += chance.expovariate(100)
        if stack and chance.random() < 0.5:
            account.switch(stack.pop(), now)
        else:
            stack.append(account.switch(chance.randrange(len(WORKER_PARTS)), now))
        if chance.random() < 0.05:
            now += 0.25
            assert sum(account.close(now)) == pytest.approx(now - begun, rel=1e-12)
            begun = now


def test_part_inside_of_another_one_is_not_counted_twice() -> None:
    account = Account(len(WORKER_PARTS), COMPUTE, 0.0)
    outer = account.switch(DATA, 1.0)
    inner = account.switch(GC, 2.0)
    account.switch(inner, 2.5)
    account.switch(outer, 4.0)
    seconds = account.close(5.0)
    assert (seconds[COMPUTE], seconds[DATA], seconds[GC]) == (2.0, 2.5, 0.5)


def test_open_time_leaves_one_part_out() -> None:
    account = Account(len(WORKER_PARTS), COMPUTE, 0.0)
    account.switch(WAIT, 2.0)
    assert account.open_s(5.0, WAIT) == 2.0
    account.switch(COMPUTE, 5.0)
    assert account.open_s(6.0, WAIT) == 3.0


def steps(count: int) -> list[Steps]:
    return [Steps(round, 1, 2.0, [0.1, float(round)]) for round in range(1, count + 1)]


@pytest.mark.parametrize(("count", "windows"), [(0, 0), (1, 1), (8, 8), (9, 8), (100, 8)])
def test_windows_have_all_rounds_in_order(count: int, windows: int) -> None:
    found = in_windows(steps(count), 8)
    assert len(found) == windows
    expected = 1
    for one in found:
        assert one.round == expected
        expected += one.rounds
    assert expected == count + 1
    assert sum(one.wall_s for one in found) == pytest.approx(sum(one.wall_s for one in steps(count)))


def test_joined_steps_keep_the_originals() -> None:
    one, two = steps(2)
    assert joined([one, two]) == Steps(1, 2, 4.0, [0.2, 3.0])
    assert one == Steps(1, 1, 2.0, [0.1, 1.0])
