"""Process sets: which ranks an operation is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.hvd.negotiation.words import GLOBAL_SET


class ProcessSets:
    """The process sets of a job, by id.

    Args:
        size: number of ranks.
        sets: further sets, from id 1 on.

    Raises:
        ValueError: a set is empty, is there twice, or has ranks that do not exist.
    """

    def __init__(self, size: int, sets: Iterable[Sequence[int]] = ()) -> None:
        self.size = size
        self._members: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._next = GLOBAL_SET + 1
        for ranks in sets:
            _, error = self.add(ranks)
            if error:
                raise ValueError(error)

    def members(self, set_id: int) -> tuple[int, ...]:
        """Return the ranks of a set, ascending; none if there is no such set."""
        return self._members.get(set_id, ())

    def find(self, ranks: Iterable[int]) -> int:
        """Return the id of the set with these ranks; -1: there is none."""
        wanted = tuple(sorted(ranks))
        return next((set_id for set_id, members in self._members.items() if members == wanted), -1)

    def add(self, ranks: Iterable[int]) -> tuple[int, str]:
        """Add a set; returns its id and an error, which is empty if all is well."""
        wanted = tuple(sorted(ranks))
        if not wanted or len(set(wanted)) != len(wanted) or wanted[0] < 0 or wanted[-1] >= self.size:
            return -1, f"a process set of ranks {list(wanted)}; it needs different ranks from 0 to {self.size - 1}"
        if self.find(wanted) >= 0:
            return -1, f"a process set of ranks {list(wanted)} exists already"
        set_id, self._next = self._next, self._next + 1
        self._members[set_id] = wanted
        return set_id, ""

    def remove(self, ranks: Iterable[int], busy: Iterable[int] = ()) -> tuple[int, str]:
        """Remove a set; returns its id (-1: none was removed) and an error."""
        found = self.find(ranks)
        if found <= GLOBAL_SET:
            return -1, ""
        if found in set(busy):
            return -1, f"the process set of ranks {list(self._members[found])} still has pending operations"
        del self._members[found]
        return found, ""
