from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.transport.outgoing import Outgoing

ITEMS = st.lists(st.tuples(st.integers(0, 50), st.one_of(st.none(), st.integers(0, 5))), max_size=30)


def drained(queue: Outgoing[int]) -> list[int]:
    found = []
    while (taken := queue.take(0)) is not None:
        found.append(taken[0])
    return found


@given(ITEMS)
def test_everything_leaves_once_and_the_lowest_number_first(items: list[tuple[int, int | None]]) -> None:
    queue: Outgoing[int] = Outgoing(100)
    for index, (size, number) in enumerate(items):
        queue.add(index, size, number)
    order = drained(queue)
    assert sorted(order) == list(range(len(items)))
    for earlier, later in pairwise(order):
        numbers = items[earlier][1], items[later][1]
        if None in numbers:
            assert earlier < later
        elif earlier > later:
            assert numbers[0] < numbers[1]  # type: ignore[operator]


@given(ITEMS)
def test_items_without_a_number_keep_their_place(items: list[tuple[int, int | None]]) -> None:
    queue: Outgoing[int] = Outgoing(100)
    for index, (size, number) in enumerate(items):
        queue.add(index, size, number)
    order = drained(queue)
    for index, (_, number) in enumerate(items):
        if number is None:
            assert set(order[: order.index(index)]) == set(range(index))


def test_window_holds_back_and_a_large_item_leaves_alone() -> None:
    queue: Outgoing[str] = Outgoing(10)
    queue.add("first", 6, 2)
    assert queue.take(0) == ("first", 6)
    queue.add("late layer", 6, 1)
    queue.add("early layer", 4, 0)
    assert queue.take(7) is None
    assert queue.take(6) == ("early layer", 4)
    assert queue.take(10) is None
    queue.add("huge", 1000, 0)
    assert queue.take(1) is None
    assert queue.take(0) == ("huge", 1000)
    assert len(queue) == 1
