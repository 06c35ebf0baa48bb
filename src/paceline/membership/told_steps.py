"""Brings together what the workers of one job tell of the same step of an optimizer. Pure.

| a step                                           | action                              |
|--------------------------------------------------|-------------------------------------|
| all live workers have told of it                 | compare them                        |
| some have, and have told of :data:`_KEPT` others | compare those that have told of it  |
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.membership.same_weights import WAY_OUT, SameWeights
from paceline.membership.weighing import Weighing
from paceline.wire import messages as m

#: Steps that are kept until all workers have told of them.
_KEPT = 8


class ToldSteps:
    """The steps that the workers of one job have told of.

    Attributes:
        weighing: how the workers weigh.
    """

    def __init__(self, way_out: str = WAY_OUT) -> None:
        self._same_weights, self.weighing = SameWeights(way_out), Weighing()
        self._found: dict[tuple[str, int], dict[int, m.WorkerStep]] = {}

    def note(self, worker: int, steps: Collection[m.WorkerStep]) -> None:
        """Take in what a worker tells; it is compared at the next :meth:`check`."""
        for one in steps:
            self._found.setdefault((one.store, one.step), {})[worker] = one
            if one.batch is not None:
                self.weighing.note(worker, one.store, one.batch)

    def check(self, expected: Callable[[], Collection[int]]) -> list[str]:
        """Return lines; ``expected`` are the ranks of the workers that may still tell something."""
        if not self._found:
            return []
        ranks = expected()
        whole = [key for key, found in self._found.items() if found.keys() >= set(ranks)]
        late = list(self._found)[:-_KEPT]
        lines = self.weighing.check(ranks)
        for key in [key for key in self._found if key in whole or key in late]:
            found = self._found.pop(key)
            lines += [*self._same_weights.compare(*key, found), *self.weighing.compare(*key, found)]
        return lines
