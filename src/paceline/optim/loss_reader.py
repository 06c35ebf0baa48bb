"""What losses are divided by: the weight of a worker with ``weigh="loss"``.

A mean is a sum divided by a number: the labels that count, the words, the elements of a mask. Batches that are joined
have the sum of their numbers, so a worker that weighs by its number trains as one process with the joined batch. The
number is read from the graph of each loss (:mod:`paceline.torch_hooks.loss_graph`); what that does not show is refused.
"""

from __future__ import annotations

import math

import torch

from paceline.errors import PacelineError
from paceline.layout.tensors import floats
from paceline.torch_hooks.loss_graph import Divisor, divisor_of
from paceline.torch_hooks.losses import Losses, tell_losses

_WAY_OUT = (
    "set optimizer.samples to the number that the loss is divided by, before each backward pass, or give "
    "DistributedOptimizer weigh='samples' or weigh='equal'"
)


class LossReader:
    """Reads the losses of every backward pass of one worker.

    Args:
        worker: rank of this worker.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._unread: Divisor | None = None
        """That of a pass that has begun, and has made no gradient yet: it may not be this optimizer's."""
        self._passes: list[Divisor] = []
        """Those of the passes since the last push."""
        self._factors: list[float] = []
        """Factors of the terms in the pass before."""
        tell_losses(self._note)

    def _note(self, losses: Losses) -> None:
        self._unread = divisor_of(losses)

    def touch(self) -> None:
        """Note that the running pass has made a gradient.

        Raises:
            PacelineError: the graph of its losses does not show what they are divided by.
        """
        if self._unread is None:
            return
        found, self._unread = self._unread, None
        if found.unknown:
            raise self._refusal(found.unknown)
        self._passes.append(found)

    def forget(self) -> None:
        """Note that gradients of the passes so far were dropped, or are pushed."""
        self._passes.clear()

    def number(self) -> float:
        """Return what the losses of the passes since the last push were divided by.

        Raises:
            PacelineError: there is no such number.
        """
        if not self._passes:
            raise self._refusal("the gradients are of no loss that backward() was called on")
        read = iter(floats([one for found in self._passes for one in (*_numbers(found), *found.factors)]))
        total = 0.0
        for found in self._passes:
            total += sum(next(read) for _ in _numbers(found))
            self._compare([next(read) for _ in found.factors])
        return total

    def _compare(self, factors: list[float]) -> None:
        """Refuse factors that change from pass to pass, but by the scale of a GradScaler: they may be weights."""
        before, self._factors = self._factors, factors
        pairs = zip(before, factors, strict=True) if len(before) == len(factors) else ()
        for one, other in pairs:
            if one and other and not math.log2(abs(other / one)).is_integer():
                raise self._refusal(f"a term is multiplied by {other:g}, and was by {one:g} in the pass before")

    def _refusal(self, reason: str) -> PacelineError:
        return PacelineError(
            f"worker {self._worker}: with weigh='loss' a worker weighs by the number that its loss is divided by, and "
            f"the graph of the loss does not show that: {reason}. Instead {_WAY_OUT}"
        )


def _numbers(found: Divisor) -> list[torch.Tensor]:
    return [] if found.number is None else [found.number]
