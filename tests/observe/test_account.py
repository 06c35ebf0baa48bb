"""Accounts of rounds, joined to windows."""

from __future__ import annotations

import pytest

from paceline.observe.account import Steps, in_windows, joined


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
