"""Which version of the values a worker holds, for every stretch of a bucket. Pure."""

from __future__ import annotations

from bisect import bisect_left


class Versions:
    """Versions of the elements of one bucket; 0 before anything was told.

    Args:
        length: of the bucket, in elements.
    """

    def __init__(self, length: int) -> None:
        self._starts = [0, length]
        self._versions = [0]

    def of(self, start: int, length: int) -> set[int]:
        """Return the versions that occur in a stretch."""
        if length == 0:
            return set()
        first, last = self._cut(start), self._cut(start + length)
        return set(self._versions[first:last])

    def set(self, start: int, length: int, version: int) -> None:
        """Set the version of a stretch."""
        if length == 0:
            return
        first, last = self._cut(start), self._cut(start + length)
        self._starts[first:last] = [start]
        self._versions[first:last] = [version]

    def _cut(self, at: int) -> int:
        """Return the index of the segment that begins at a position, after cutting there."""
        index = bisect_left(self._starts, at)
        if self._starts[index] != at:
            self._starts.insert(index, at)
            self._versions.insert(index, self._versions[index - 1])
        return index
