"""Sets of positions as ranges: the same as sets of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.layout.ranges import Ranges, common, cut, everything, is_all, joined, others, within, without

END = 12
pairs = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)), max_size=6)


def positions(ranges: Ranges) -> set[int]:
    return {position for start, stop in ranges for position in range(start, stop)}


def is_normal(ranges: Ranges) -> bool:
    flat = [end for one in ranges for end in one]
    return flat == sorted(set(flat))


@given(pairs)
def test_joined_ranges_are_the_same_positions_in_order_and_apart(found: list[tuple[int, int]]) -> None:
    ranges = joined(found)
    assert is_normal(ranges)
    assert positions(ranges) == positions(tuple(found))


@given(pairs, pairs, st.integers(0, END), st.integers(0, END))
def test_ranges_behave_as_sets(one: list[tuple[int, int]], other: list[tuple[int, int]], start: int, stop: int) -> None:
    left, right, span = joined(one), joined(other), set(range(start, stop))
    assert positions(common(left, right)) == positions(left) & positions(right)
    assert common(left, left) == left
    if start < stop:
        assert positions(within(left, start, stop)) == {one - start for one in positions(left) & span}
        assert positions(without(left, start, stop)) == positions(left) - span
        assert is_normal(without(left, start, stop))
        assert is_normal(within(left, start, stop))


def test_all_positions_are_told_from_some() -> None:
    assert is_all(((0, 3),), 3)
    assert not is_all(((0, 2),), 3)
    assert not is_all((), 3)


@given(pairs, st.integers(0, END))
def test_ranges_are_cut_and_turned_round(found: list[tuple[int, int]], count: int) -> None:
    ranges = joined(found)
    first, rest = cut(ranges, count)
    assert sorted(positions(ranges))[:count] == sorted(positions(first))
    assert positions(rest) == positions(ranges) - positions(first)
    assert positions(everything(END)) == set(range(END))
    assert positions(others(ranges, END)) == set(range(END)) - positions(ranges)
    assert all(map(is_normal, (first, rest, others(ranges, END))))
    assert everything(0) == ()
