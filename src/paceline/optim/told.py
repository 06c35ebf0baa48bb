"""What a worker tells of its steps: how it weighs, and the batches of some of them (:mod:`paceline.membership`)."""

from __future__ import annotations

from typing import Literal

from paceline.optim.samples import SampleCounter
from paceline.torch_hooks.losses import HeardLosses
from paceline.wire import messages as m

#: Steps whose batches are told; later ones where their losses are to be compared, or it weighs in another way.
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
        self._losses = HeardLosses() if merge == "mean" else None

    def of_step(self, step: int) -> m.StepBatch | None:
        """Return what to tell of the batch of a step, counted from 1, whose push was the last one; None: nothing."""
        count = self._samples.last
        if count is None:
            return None
        way = count.way
        if self._merge != "mean" and way:
            way = self._merge
        loss = None if self._losses is None else self._losses.take(count.rows)
        if step > _FIRST and way in self._ways and loss is None:
            return None
        self._ways.add(way)
        if self._merge != "mean":
            return m.StepBatch(way, count.samples)
        return m.StepBatch(way, count.samples, count.rows, loss, count.shapes, count.why)
