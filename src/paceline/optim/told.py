"""What a worker tells of its steps: how it weighs, and the batches of some of them (:mod:`paceline.membership`)."""

from __future__ import annotations

import logging
from typing import Literal

from paceline.optim.samples import SampleCounter
from paceline.torch_hooks.losses import HeardLosses
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Steps whose batches are told; later ones where their losses are to be compared, or it weighs in another way.
_FIRST = 16


class ToldBatches:
    """The batches of one worker.

    Args:
        samples: counts them.
        merge: what is made of the workers' pushes.
        worker: rank of this worker.
    """

    def __init__(self, samples: SampleCounter, merge: Literal["mean", "sum", "each"], worker: int) -> None:
        self._samples, self._merge, self._worker = samples, merge, worker
        self._has_said = False
        self._ways: set[m.Way] = set()
        self._losses = HeardLosses() if merge == "mean" else None

    def of_step(self, step: int) -> m.StepBatch | None:
        """Return what to tell of the batch of a step, counted from 1, whose push was the last one; None: nothing."""
        self._check_samples()
        count = self._samples.last
        if count is None:
            return None
        way = count.way
        if self._merge != "mean" and way:
            way = self._merge
        loss = None if self._losses is None else self._losses.take(count.rows)
        if self._losses is not None and self._losses.have_ended:
            self._losses = None
        if step > _FIRST and way in self._ways and loss is None:
            return None
        self._ways.add(way)
        if self._merge != "mean":
            return m.StepBatch(way, count.samples)
        return m.StepBatch(way, count.samples, count.rows, loss, count.shapes, count.why)

    def _check_samples(self) -> None:
        """Say once where samples that the script tells may not be those that the losses are divided by."""
        pushes = list(self._samples.taken)
        self._samples.taken.clear()
        if self._has_said or self._merge != "mean":
            return
        sizes = sorted({size for push in pushes for size in push})
        if self._samples.is_new:
            text = (
                f"optimizer.samples was set to {self._samples.given:g} after the gradients of this step had left, as "
                "they do in backward() with update='worker': set it before"
            )
        elif len(sizes) > 1:
            ways = ("the whole step", "its own pass", "leave backward_passes_per_step out, with update='worker'")
            if all(len(push) == 1 for push in pushes):
                ways = ("its own pass", "the whole step", "set backward_passes_per_step")
            text = (
                f"backward passes of one step have {sizes[0]:g} and {sizes[-1]:g} samples. Together they are the mean "
                f"over all samples if each loss is divided by the samples of {ways[0]}. If it is by those of "
                f"{ways[1]}, {ways[2]}"
            )
        else:
            return
        self._has_said = True
        logger.warning("worker %d: %s", self._worker, text)
