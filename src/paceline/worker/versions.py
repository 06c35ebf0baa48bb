"""Versions of the values that a worker holds, for every range of a bucket. Pure."""

from __future__ import annotations

from paceline.interval_map import IntervalMap, same


class Versions:
    """Versions of the elements of one bucket; 0 until the server sends a version.

    Args:
        length: length of the bucket, in elements.
    """

    def __init__(self, length: int) -> None:
        self._versions = IntervalMap(length, 0)

    def of(self, start: int, length: int) -> set[int]:
        """Return the versions that occur in a range."""
        return set(self._versions.touched(start, start + length)) if length else set()

    def set(self, start: int, length: int, version: int) -> None:
        """Set the version of a range."""
        stop = start + length
        self._versions.set(start, stop, version)
        self._versions.join(start - 1, stop + 1, same)
