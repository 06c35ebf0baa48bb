"""The losses of backward passes: the numbers that they are divided by, and the checks of the first ones."""

from __future__ import annotations

import logging

import torch

from paceline.errors import PacelineError
from paceline.torch_hooks.loss_graph import CountedMean, PassLosses, Reduced, tell_losses

logger = logging.getLogger(__name__)

#: Backward passes whose losses are checked: a script makes them in one way.
_CHECKED = 20


class LossReader:
    """Reads the losses of every backward pass before it frees what shows them.

    Args:
        worker: rank of this worker.
        says_doubt: this worker says what is uncertain, for all.
    """

    def __init__(self, worker: int, says_doubt: bool) -> None:
        self._worker, self._says_doubt = worker, says_doubt
        self.is_unread = False
        """Whether a pass has begun, and has made no gradient yet."""
        self._left = _CHECKED
        """Passes whose losses are still checked."""
        self._mean: CountedMean | None = None
        """The mean that the losses of the pass that was called last are, if their graph has its divisor."""
        self._kinds: set[Reduced] = set()
        """How these losses are made, if they are checked."""
        self._are_divided_twice = False
        """Whether they are a sum that two numbers divide, if they are checked."""
        self._hidden_in: str | None = None
        """Name of the operation that hides what they are divided by, if they are checked."""
        tell_losses(self._note)

    def _note(self, losses: PassLosses) -> None:
        """Note the losses of the pass that begins, which may not be this optimizer's."""
        self.is_unread = True
        self._mean = losses.mean
        if self._left:
            self._kinds, self._are_divided_twice = losses.kinds, losses.are_divided_twice
            self._hidden_in = losses.hidden_in

    def of_pass(self, is_given: bool) -> torch.Tensor | None:
        """Return the number that divides the losses of a pass that has made a gradient; None: it is not certain.

        Args:
            is_given: the user has told the weight of the batch.

        Raises:
            PacelineError: a loss is a sum, and workers weigh by samples.
        """
        mean, kinds, is_divided_twice, hidden_in = self._mean, self._kinds, self._are_divided_twice, self._hidden_in
        self._mean, self._kinds, self._are_divided_twice, self._hidden_in = None, set(), False, None
        self.is_unread = False
        if self._left:
            self._left -= 1
            if Reduced.SUM in kinds:
                raise PacelineError(
                    f"worker {self._worker}: the loss is a sum over this worker's samples, and gradients are averaged "
                    "over all samples, as those of means: give DistributedOptimizer reduction='sum', or let the loss "
                    "be a mean (reduction='mean', or the sum divided by the samples of the batch)"
                )
            says = self._says_doubt and not is_given
            has_unlike_terms = mean is not None and not mean.is_alone and Reduced.OVER_LABELS in kinds
            if says and is_divided_twice:
                self._says_doubt = False
                logger.warning(
                    "the loss is a sum that is divided twice, as by its words and by the steps of an accumulation: "
                    "neither number is taken for the weight of a worker. If the sum is divided by words or others that "
                    "count, not by samples, set optimizer.samples to their number before the first backward pass of "
                    "each step"
                )
            if says and hidden_in is not None:
                self._says_doubt = False
                logger.warning(
                    "the loss is computed in %s, which does not show what divides it: it is taken for a mean over "
                    "samples. If it is one over labels or words, of which batches have unlike numbers (padding), set "
                    "optimizer.samples to the number that counts before the first backward pass of each step. If it is "
                    "a sum, give DistributedOptimizer reduction='sum'",
                    hidden_in,
                )
            if says and has_unlike_terms:
                self._says_doubt = False
                logger.warning(
                    "the loss is a mean over labels, of which some are ignored or have weights of their classes, and "
                    "has other terms: workers weigh by these labels, so other terms are no exact means over samples. "
                    "To weigh all terms by samples, set optimizer.samples to the size of each batch"
                )
        return None if mean is None or is_given else mean.weight
