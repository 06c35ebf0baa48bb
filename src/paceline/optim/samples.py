"""Counts the samples behind a push."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline.optim.backward import engine

logger = logging.getLogger(__name__)


class Samples:
    """Counts the samples of forward passes that had a backward pass since the last push.

    Forward passes without a backward pass are not counted (outputs that are logged, or detached). Backward passes that
    reach none of the optimizer's parameters are not counted either (a frozen critic that only passes gradients on).

    Args:
        given: samples of every local batch, or None to count.
        batch_dim: dimension of the inputs that counts samples.
    """

    def __init__(self, given: float | None, batch_dim: int) -> None:
        self.given, self._batch_dim = given, batch_dim
        self._seen = self._pending = 0.0
        self._touched = False
        self.last = 1.0
        """Samples of the last push."""
        self._warned = False

    def see(self, inputs: Any, outputs: Any) -> None:
        """Register one forward pass: its samples are counted in each backward pass through its outputs.

        Args:
            inputs: positional and keyword inputs, nested or not. The first tensor that has the dimension is used.
            outputs: likewise. If they are objects whose tensors cannot be found, the forward pass is counted at once.
        """
        nodes = {one.grad_fn for one in tensors_in(outputs) if one.grad_fn is not None}
        number = self._number(inputs) if nodes else 0
        last_pass = -1

        def count(*_: Any) -> None:
            nonlocal last_pass
            this_pass = torch._C._current_graph_task_id()
            if this_pass != last_pass:
                last_pass = this_pass
                self._pending += number
                engine.queue_callback(self._end_pass)

        for node in nodes if number else ():
            node.register_prehook(count)
        if not nodes and torch.is_grad_enabled() and _hides_tensors(outputs):
            self._seen += self._number(inputs)

    def touch(self) -> None:
        """Note that the running backward pass has reached a parameter of the optimizer."""
        self._touched = True

    def _end_pass(self) -> None:
        self._seen += self._pending if self._touched else 0.0
        self._pending, self._touched = 0.0, False

    def _number(self, inputs: Any) -> int:
        for tensor in tensors_in(inputs):
            if tensor.dim() > self._batch_dim:
                return tensor.shape[self._batch_dim]
        if self.given is None and not self._warned:
            self._warned = True
            logger.warning(
                "the inputs of the model hold no tensor with dimension %d, so samples cannot be counted and all "
                "workers weigh alike; set optimizer.samples to the size of each batch if they differ", self._batch_dim,
            )  # fmt: skip
        return 0

    def take(self) -> float:
        """Return the samples of the push that begins now; without a forward pass, those of the last push."""
        if self.given is not None:
            self.last = float(self.given)
        elif self._seen + self._pending:
            self.last = self._seen + self._pending
        self._seen = self._pending = 0.0
        return self.last


def tensors_in(inputs: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples, mappings and dataclasses, in order."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(dict(leaf))
        elif dataclasses.is_dataclass(leaf):
            found += tensors_in(vars(leaf))
    return found


def _hides_tensors(outputs: Any) -> bool:
    """Return whether there is an object that is not searched for tensors."""
    plain = (torch.Tensor, Mapping, str, bytes, int, float, type(None))
    leaves = pytree.tree_leaves(outputs)
    return any(not isinstance(leaf, plain) and not dataclasses.is_dataclass(leaf) for leaf in leaves)
