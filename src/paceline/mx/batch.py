"""One training batch of a ``Module`` over its replicas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.mx.context import Context
from paceline.mx.gluon.backward import backward
from paceline.mx.gluon.parallel import run_replicas
from paceline.mx.gluon.replicate import ReplicatedModule
from paceline.mx.gluon.sync_batch_norm import SyncBatchNorm
from paceline.mx.slicer import Slicer, clock, size_of

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class _Done:
    """Result of one replica."""

    output: Any
    loss: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class BatchResult:
    """Result of all replicas for one batch."""

    outputs: list[Any]
    mean_loss: torch.Tensor
    batch_size: int


class BatchRunner:
    """Runs forward and backward of one batch on all replicas in parallel; measures times if the split is automatic.

    Args:
        net: the model.
        loss: ``loss(output, label)``: per sample, or a scalar that is the mean over the samples of its slice.
        slicer: cuts batches.
    """

    def __init__(self, net: ReplicatedModule, loss: Loss, slicer: Slicer) -> None:
        self._net, self._loss, self._slicer = net, loss, slicer
        joined = any(isinstance(one, SyncBatchNorm) for one in net.replicas[0].modules())
        self._joined = joined and len(net.contexts) > 1

    def run(self, data: Any, label: Any) -> BatchResult:
        """Compute the gradients of the sum of the losses of one batch.

        Raises:
            ValueError: a device would get no sample.
            PacelineError: the loss of a slice is NaN or infinite.
        """
        batch_size = size_of(data)
        if size_of(label) != batch_size:
            raise ValueError(f"the batch has {batch_size} samples but {size_of(label)} labels")
        sizes = self._slicer.sizes(batch_size)
        inputs, labels = self._slicer.cut(_as_tuple(data), sizes), self._slicer.cut(label, sizes)
        self._net.infer_shapes(*inputs[0])
        done = run_replicas(self._net.contexts, self._jobs(inputs, labels, sizes))
        losses = [one.loss for one in done]
        self._check(losses)
        if self._joined:
            backward(losses)
        if self._slicer.planner is not None:
            self._slicer.planner.observe(sizes, [one.seconds for one in done])
        mean = torch.stack([one.detach().to(losses[0].device) for one in losses]).sum() / batch_size
        return BatchResult([one.output for one in done], mean, batch_size)

    def _jobs(self, inputs: Sequence[Any], labels: Sequence[Any], sizes: Sequence[int]) -> list[Callable[[], _Done]]:
        work = zip(self._net.contexts, self._net.replicas, inputs, labels, sizes, strict=True)
        return [functools.partial(self._replica, *one) for one in work]

    def _replica(self, context: Context, replica: nn.Module, inputs: Sequence[Any], label: Any, size: int) -> _Done:
        exact = self._slicer.planner is not None
        start = clock(context, exact)
        output = replica(*inputs)
        loss = total_loss(self._loss(output, label), size)
        if not self._joined:
            torch.autograd.backward(loss)
        return _Done(output, loss, max(clock(context, exact) - start, 1e-9))

    def _check(self, losses: Sequence[torch.Tensor]) -> None:
        for context, loss in zip(self._net.contexts, losses, strict=True):
            if not math.isfinite(loss.item()):
                self._net.zero_grad()
                raise PacelineError(
                    f"the loss on {context} is {loss.item()}: nothing was updated. Lower the learning rate, and look "
                    "for NaN or huge values in this batch"
                )


def total_loss(loss: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sum over samples of a loss per sample, or of a scalar that is their mean.

    Raises:
        TypeError: the loss is not a tensor.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss(output, label) returned {type(loss).__name__}, not a tensor")
    return loss * size if loss.dim() == 0 else loss.sum() * (size / loss.shape[0])


def _as_tuple(data: Any) -> tuple[Any, ...]:
    return tuple(data) if isinstance(data, tuple | list) else (data,)
