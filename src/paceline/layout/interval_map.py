"""A value for every interval of ``[0, length)``. Pure.

Queries never cut. A caller that changes a range cuts at its ends, and joins neighbours whose values have become equal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

#: ``split(value, at)``: the values left and right of a cut, ``at`` elements after the interval's start.
Split: TypeAlias = Callable[[T, int], tuple[T, T]]
#: ``joined(left, right)``: the value of two neighbours as one interval; None: they stay apart.
Joined: TypeAlias = Callable[[T, T], T | None]


class IntervalMap(Generic[T]):
    """Holds one value per interval; intervals are not empty and cover ``[0, length)``.

    A map of length 0 has one interval, which makes up its only, empty range.

    Args:
        length: elements, 0 or more.
        value: value of the one interval at the start.

    Attributes:
        values: values of the intervals, in order; others may replace one, but add and remove none.
    """

    def __init__(self, length: int, value: T) -> None:
        self.length = length
        self.values = [value]
        self._starts = [0]

    def over(self, start: int, stop: int) -> list[tuple[int, int, T]]:
        """Return (start, stop, value) of the intervals that overlap a range, clipped to it, without a cut."""
        first, last = self._touched(start, stop)
        stops = [*self._starts[first + 1 : last], stop]
        starts = [start, *self._starts[first + 1 : last]]
        return list(zip(starts, stops, self.values[first:last], strict=True)) if first < last else []

    def touched(self, start: int, stop: int) -> list[T]:
        """Return the values of the intervals that overlap a range, without a cut."""
        first, last = self._touched(start, stop)
        return self.values[first:last]

    def cut(self, start: int, stop: int, split: Split[T]) -> list[T]:
        """Return the values of the intervals that make up a range, cut at its ends, where they are no edges."""
        if start < stop:
            self._cut_at(start, split)
            self._cut_at(stop, split)
        return self.touched(start, stop)

    def set(self, start: int, stop: int, value: T) -> None:
        """Give a range one value: it becomes one interval, and replaces those below it."""
        if start >= stop:
            return
        self.cut(start, stop, lambda old, at: (old, old))
        first, last = self._touched(start, stop)
        self._starts[first:last], self.values[first:last] = [start], [value]

    def put(self, start: int, stop: int, value: T) -> None:
        """Give a range one value, and join it with neighbours of the same value."""
        self.set(start, stop, value)
        self.join(start - 1, stop + 1, lambda left, right: left if left == right else None)

    def join(self, start: int, stop: int, joined: Joined[T]) -> None:
        """Join neighbours whose common edge lies inside of a range, not at its ends."""
        index = max(1, bisect_right(self._starts, start))
        while index < len(self._starts) and self._starts[index] < stop:
            one = joined(self.values[index - 1], self.values[index])
            if one is None:
                index += 1
            else:
                self.values[index - 1 : index + 1] = [one]
                del self._starts[index]

    def _touched(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and last index (exclusive) of the intervals that overlap a range."""
        if start < stop:
            return bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        return (0, 1) if self.length == 0 else (0, 0)

    def _cut_at(self, position: int, split: Split[T]) -> None:
        index = bisect_right(self._starts, position) - 1
        start = self._starts[index]
        if start < position < self.length:
            self.values[index : index + 1] = split(self.values[index], position - start)
            self._starts.insert(index + 1, position)
