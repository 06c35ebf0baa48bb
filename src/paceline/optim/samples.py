"""How many samples are behind a push."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

logger = logging.getLogger(__name__)


class Samples:
    """Counts the samples that went through a model since the last push.

    Args:
        given: samples of every local batch, or None to count.
        batch_dim: dimension of the inputs that counts samples.
    """

    def __init__(self, given: float | None, batch_dim: int) -> None:
        self.given, self._batch_dim = given, batch_dim
        self._seen = 0.0
        self.last = 1.0
        """Of the last push."""
        self._warned = False

    def see(self, inputs: Any) -> None:
        """Count the samples of one forward pass: the size of the first tensor that has the dimension.

        Args:
            inputs: positional and keyword inputs, nested as they may be.
        """
        for tensor in tensors_in(inputs):
            if tensor.dim() > self._batch_dim:
                self._seen += tensor.shape[self._batch_dim]
                return
        if self.given is None and not self._warned:
            self._warned = True
            logger.warning(
                "the inputs of the model hold no tensor with dimension %d, so samples cannot be counted and all "
                "workers weigh alike; set optimizer.samples to the size of each batch if they differ", self._batch_dim,
            )  # fmt: skip

    def take(self) -> float:
        """Return the samples behind the push that begins now; without a forward pass, those of the last one."""
        if self.given is not None:
            self.last = float(self.given)
        elif self._seen:
            self.last = self._seen
        self._seen = 0.0
        return self.last


def tensors_in(inputs: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples, dictionaries and other mappings, in order."""
    leaves = pytree.tree_leaves(inputs)
    found: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(dict(leaf))
    return found
