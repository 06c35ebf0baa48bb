"""What a worker tells of its steps: how it weighs, and its batches of the first steps (:mod:`paceline.membership`)."""

from __future__ import annotations

from typing import Literal

from paceline.optim.samples import SampleCounter
from paceline.wire import messages as m

#: Steps whose batches are told.
_FIRST = 16


class ToldBatches:
    """The batches of one worker.

    Args:
        samples: counts them.
        merge: what is made of the workers' pushes.
    """

    def __init__(self, samples: SampleCounter, merge: Literal["mean", "sum", "each"]) -> None:
        self._samples, self._merge = samples, merge
        self._ways: set[m.Way] = set()

    def of_step(self, step: int) -> m.StepBatch | None:
        """Return what to tell of the batch of a step, counted from 1, whose push was the last one; None: nothing."""
        count = self._samples.last
        if count is None:
            return None
        told = m.StepBatch(count.way, count.samples, count.shapes, count.why)
        if self._merge != "mean" and count.way:
            told = m.StepBatch(self._merge, count.samples)
        if step > _FIRST and told.way in self._ways:
            return None
        self._ways.add(told.way)
        return told
