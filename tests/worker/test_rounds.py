"""Rounds of ranges, against a list with one round per element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.block import Rounds

LENGTH = 12
RANGE = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(lambda one: (one[0], sum(one)))


@given(st.lists(RANGE.map(lambda one: (one[0], min(one[1], LENGTH))), max_size=20))
def test_every_element_is_pushed_once_with_its_next_round_in_as_few_pieces_as_that_takes(
    pushes: list[tuple[int, int]],
) -> None:
    rounds, expected = Rounds(LENGTH), [0] * LENGTH
    for start, stop in pushes:
        expected[start:stop] = [round + 1 for round in expected[start:stop]]
        pieces = rounds.next(start, stop - start)
        told = [(element, round) for first, length, round in pieces for element in range(first, first + length)]
        assert told == list(zip(range(start, stop), expected[start:stop], strict=True))
        changes = sum(
            one != other for one, other in zip(expected[start:stop], expected[start + 1 : stop], strict=False)
        )
        assert len(pieces) == 1 + changes


def test_an_empty_bucket_is_pushed_too() -> None:
    rounds = Rounds(0)
    assert [rounds.next(0, 0), rounds.next(0, 0)] == [[(0, 0, 1)], [(0, 0, 2)]]


def test_parts_that_have_come_as_far_travel_as_one() -> None:
    rounds = Rounds(8)
    assert rounds.next(0, 3) == [(0, 3, 1)]
    assert rounds.next(0, 8) == [(0, 3, 2), (3, 5, 1)]
    assert rounds.next(3, 5) == [(3, 5, 2)]
    assert rounds.next(0, 8) == [(0, 8, 3)]
