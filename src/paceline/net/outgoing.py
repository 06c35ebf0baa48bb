"""The order of messages that wait to be sent to one peer. Pure."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outgoing(Generic[Item]):
    """A priority queue: the lowest number is sent first, after Jayarajan et al. 2019 (P3) and Peng et al. 2019.

    Items without a number keep their place: they overtake nothing, and nothing overtakes them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, Item]] = []
        self._section = self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Item, number: int | None = None) -> None:
        """Add an item; of those with a number the lowest is sent first."""
        if number is None:
            self._section += 1
        self._count += 1
        heapq.heappush(self._waiting, (self._section, number or 0, self._count, item))
        if number is None:
            self._section += 1

    def take(self) -> Item:
        """Remove and return the next item.

        Raises:
            IndexError: there is none.
        """
        return heapq.heappop(self._waiting)[-1]
