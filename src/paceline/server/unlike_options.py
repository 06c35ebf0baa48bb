"""Finds workers whose optimizers have other options, in stores where an update has the options of its own push. Pure.

Workers that go at their own pace change a learning rate in the same round (a schedule by steps) or at the same time (a
schedule by epochs, whose samples come from a pool). Where neither explains it, not all workers run the schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from operator import itemgetter

from paceline.updaters import StepOptions, options_apart

#: Pushes that have other options before it is said: at the end of an epoch a slow worker may change them a push late.
_PUSHES = 4

#: Changes of a worker's options that are kept, for the rounds of slower ones.
_KEPT = 1000


class UnlikeOptions:
    """The options of a store's workers, round by round."""

    def __init__(self) -> None:
        self._changes: dict[int, deque[tuple[int, StepOptions]]] = {}
        """By worker, the first rounds of its options."""
        self._last: dict[int, int] = {}
        """By worker, its last round."""
        self._apart: Counter[tuple[int, int]] = Counter()
        """By two workers, pushes in a row with other options."""

    def note(self, worker: int, round: int, options: StepOptions) -> str:
        """Take in the options of a push; returns how they differ from those of another worker, if they do for long."""
        if round <= self._last.get(worker, 0):
            return ""  # it comes again
        changes = self._changes.setdefault(worker, deque(maxlen=_KEPT))
        if not changes or changes[-1][1] is not options:
            changes.append((round, options))
        self._last[worker] = round
        first = min(self._changes)
        for other in [first] if worker != first else [one for one in self._changes if one != first]:
            pair = (other, worker) if other < worker else (worker, other)
            found = self._difference(worker, other, round)
            if found is not None:
                self._apart[pair] = self._apart[pair] + 1 if found else 0
            if found and self._apart[pair] >= _PUSHES:
                return f"{found} in round {round}"
        return ""

    def _difference(self, worker: int, other: int, round: int) -> str | None:
        """Return how options differ from those of another worker, in that round and now; None: it is not known."""
        ours, theirs = self._changes[worker][-1][1], self._changes[other]
        place = bisect_right(theirs, round, key=itemgetter(0))
        if self._last[other] < round or not place:
            return None
        apart = ""
        for one in (theirs[-1][1], theirs[place - 1][1]):
            apart = "" if one is ours else options_apart(ours, one, worker, other)
            if not apart:
                break
        return apart
