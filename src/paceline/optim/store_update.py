"""The strategy for stores that only broadcast and sum: all-reduce, one process with a codec, third parties' stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from paceline.kvstore.base import KVStoreBase
from paceline.optim.buffers import buffers_of, untrained
from paceline.optim.local_update import MergingUpdate
from paceline.optim.strategy import Named, Setup
from paceline.optim.watch import refuse_renormalising
from paceline.tensors import real_view

Tensors = Mapping[str, torch.Tensor]

#: Keys besides the names of the model: of weights and of who has which gradient, and of numbers.
_COUNTS, _SUMS = "counts", "sums"


class StoreUpdate(MergingUpdate):
    """Merges through a store's ``pushpull``. Buffers of the model follow rank 0's with each merge.

    A mean is over the samples of all workers: a worker multiplies its gradients by its samples, divided by the mean
    number of a worker in the merge before. That number is the same on all workers, and gradients keep their magnitude.

    Args:
        setup: the optimizer, its parameters and the user's options.
        store: only broadcasts and reduces.
    """

    def __init__(self, setup: Setup, store: KVStoreBase) -> None:
        super().__init__(setup, store)
        self._samples, self._model = setup.samples, setup.model
        self._alone = store.num_workers == 1
        self._mean_samples = 0.0
        if self._model is not None and not self._alone:
            refuse_renormalising(self._model)
            self._broadcast(untrained(self._model, [param for _, param, _ in setup.named]) | buffers_of(self._model))
        self._broadcast(_real((name, param.data) for name, param, _ in setup.named))

    def _broadcast(self, tensors: Tensors) -> None:
        values = _floating(tensors)
        if values:
            self.store.broadcast(list(values), list(values.values()), list(values.values()))
        for name, one in tensors.items():
            if one is not values[name]:
                one.copy_(values[name])

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        self._samples.touch()
        super()._on_gradient(param)

    def merge(self) -> None:
        """Push gradients and pull their sum or mean.

        A gradient that this worker does not have counts as zeros. One that no worker has stays None, so that the
        optimizer leaves the parameter alone, as in one process.
        """
        if self._alone:
            self._push(_real((name, param.grad) for name, param, _ in self.named if param.grad is not None), {})
            return
        params = {name: param for name, param, _ in self.named if param.requires_grad or param.grad is not None}
        present = [param.grad is not None for param in params.values()]
        for param in params.values():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad.resolve_conj()
        grads = _real((name, param.grad) for name, param in params.items() if param.grad is not None)
        weight = self._weight()
        if weight != 1:
            torch._foreach_mul_(list(grads.values()), weight)
        counts = torch.tensor([weight, *present], dtype=torch.float64)
        buffers = {} if self._model is None else buffers_of(self._model)
        self._push({**grads, f"{_COUNTS} of {len(present)}": counts}, buffers)
        weights, *owners = counts.tolist()
        for param, count in zip(params.values(), owners, strict=True):
            if not count:
                param.grad = None
        if self.choices.reduction == "mean" and weights:
            torch._foreach_div_(list(grads.values()), weights)
            self._mean_samples *= weights / self.store.num_workers

    def _weight(self) -> float:
        """Return what this worker's gradients are multiplied by before they are summed."""
        if self.choices.reduction == "sum":
            return 1.0
        samples = self._samples.take()
        if not self._mean_samples:
            [total] = self._totals(samples)
            self._mean_samples = total / self.store.num_workers or 1.0
        return samples / self._mean_samples

    def _push(self, summed: Tensors, first: Tensors) -> None:
        """Replace tensors by their sums over the workers, and others by rank 0's."""
        owns = self.store.rank == 0
        copies = {name: one.clone() if owns else torch.zeros_like(one) for name, one in _floating(first).items()}
        values = [*summed.values(), *copies.values()]
        self.store.pushpull([*summed, *copies], values, values)
        for name, one in first.items():
            one.copy_(copies[name])

    def merge_loss(self, loss: Any) -> Any:
        """Return the mean of the workers' losses, weighted by samples; with reduction ``sum`` their sum."""
        if self._alone or not isinstance(loss, torch.Tensor | float | int):
            return loss
        weight = self._samples.last if self.choices.reduction == "mean" else 1.0
        value, weights = self._totals(float(loss) * weight, weight)
        if self.choices.reduction == "mean":
            value /= weights or 1.0
        return loss.detach().clone().fill_(value) if isinstance(loss, torch.Tensor) else value

    def _totals(self, *values: float) -> list[float]:
        """Return the sums of the workers' values."""
        total = torch.tensor(values, dtype=torch.float64)
        self.store.pushpull(f"{_SUMS} of {len(values)}", total, total)
        return total.tolist()

    def broadcast_weights(self) -> None:
        """Set the weights of all workers to rank 0's. Every worker calls it."""
        if not self._alone:
            self._push({}, _real((name, param.data) for name, param, _ in self.named))

    def add(self, named: Named) -> None:
        """Add the parameters of new param groups."""
        super().add(named)
        self._broadcast(_real((name, param.data) for name, param, _ in named))


def _floating(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors, integers as float64: a third party's store may hold floating-point numbers only."""
    return {name: one if one.is_floating_point() else one.double() for name, one in tensors.items()}


def _real(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: real_view(one) for name, one in named}
