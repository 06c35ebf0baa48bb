from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.net.connection import Outgoing

ITEMS = st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=30)


def drained(queue: Outgoing[int]) -> list[int]:
    return [queue.take() for _ in range(len(queue))]


@given(ITEMS)
def test_everything_leaves_once_and_the_lowest_number_first(items: list[int | None]) -> None:
    queue: Outgoing[int] = Outgoing()
    for index, number in enumerate(items):
        queue.add(index, number)
    order = drained(queue)
    assert sorted(order) == list(range(len(items)))
    for earlier, later in pairwise(order):
        numbers = items[earlier], items[later]
        if None in numbers:
            assert earlier < later
        elif earlier > later:
            assert numbers[0] < numbers[1]  # type: ignore[operator]


@given(ITEMS)
def test_items_without_a_number_keep_their_place(items: list[int | None]) -> None:
    queue: Outgoing[int] = Outgoing()
    for index, number in enumerate(items):
        queue.add(index, number)
    order = drained(queue)
    for index, number in enumerate(items):
        if number is None:
            assert set(order[: order.index(index)]) == set(range(index))
