"""Which parts of a slot workers have seen, until they have seen all of it. Pure.

Who reads a slot part by part, key by key, has read it when all parts are read at one version. Until then it counts as
not read, so that a push is never taken for fresher than it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.ranges import Ranges, is_all, joined, within


class Parts:
    """For each worker, the parts that it has seen at one version.

    Args:
        seen: (version, parts) by worker.
    """

    def __init__(self, seen: Mapping[int, tuple[int, Ranges]] | None = None) -> None:
        self._seen = dict(seen or {})

    def add(self, worker: int, version: int, start: int, stop: int, length: int) -> bool:
        """Note that a worker sees a part; returns whether it has now seen all ``length`` elements at this version."""
        last, parts = self._seen.pop(worker, (version, ()))
        parts = joined([*(parts if last == version else ()), (start, stop)])
        if length == 0 or is_all(parts, length):
            return True
        self._seen[worker] = version, parts
        return False

    def within(self, start: int, stop: int) -> Parts:
        """Return the parts in ``[start, stop)``, counted from ``start``."""
        return Parts({worker: (version, within(parts, start, stop)) for worker, (version, parts) in self._seen.items()})

    def beside(self, right: Parts, at: int) -> Parts:
        """Return these parts and those of a right neighbour that begins ``at`` elements after this slot."""
        seen = dict(self._seen)
        for worker, (version, parts) in right._seen.items():
            last, before = seen.get(worker, (version, ()))
            moved = joined([*(before if last == version else ()), *((at + a, at + b) for a, b in parts)])
            if last <= version:
                seen[worker] = version, moved
        return Parts(seen)
