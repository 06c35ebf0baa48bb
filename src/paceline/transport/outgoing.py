"""The order of messages that wait to be sent to one peer. Pure."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Bytes in flight to one peer: enough to keep any network busy, and few, because urgent messages cannot overtake them.
WINDOW_BYTES = 16 * 1024 * 1024


class Outgoing(Generic[Item]):
    """A priority queue: the lowest number is sent first, after Jayarajan et al. 2019 (P3) and Peng et al. 2019.

    Messages that the transport has cannot be overtaken. So it gets no more than a window of bytes at a time, and the
    rest waits here. Items without a number keep their place: they overtake nothing, and nothing overtakes them.

    Args:
        window: limit of the bytes in flight. A single larger item is allowed.
    """

    def __init__(self, window: int = WINDOW_BYTES) -> None:
        self._window = window
        self._waiting: list[tuple[int, int, int, int, Item]] = []
        self._section = self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Item, size: int, number: int | None = None) -> None:
        """Add an item of ``size`` bytes; of those with a number the lowest is sent first."""
        if number is None:
            self._section += 1
        self._count += 1
        heapq.heappush(self._waiting, (self._section, number or 0, self._count, size, item))
        if number is None:
            self._section += 1

    def take(self, under_way: int) -> tuple[Item, int] | None:
        """Return the next item and its bytes when the window has room for it.

        Args:
            under_way: bytes that the transport has and has not sent yet.
        """
        if not self._waiting or (under_way and under_way + self._waiting[0][3] > self._window):
            return None
        *_, size, item = heapq.heappop(self._waiting)
        return item, size
