"""One training batch of a ``Module``: how it is cut over devices of unequal speed, and how its replicas run it."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.hetero import Shares, Speed, split_evenly
from paceline.layout.tensors import as_tensor
from paceline.mx.context import Context, moved
from paceline.mx.gluon.parallel import backward, run_replicas
from paceline.mx.gluon.replicate import ReplicatedModule
from paceline.mx.gluon.sync_batch_norm import SyncBatchNorm
from paceline.mx.gluon.utils import work_load_sizes

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
WorkLoad: TypeAlias = Sequence[float] | Literal["auto"] | None

_WARM_UP = 1
_WINDOW = 5
#: Parts in which shares are counted.
_PARTS = 10**6


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
    """Runs forward and backward of one batch on all replicas in parallel; measures times if the split is automatic."""

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
        inputs = self._slicer.cut(data if isinstance(data, tuple | list) else (data,), sizes)
        labels = self._slicer.cut(label, sizes)
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


def shares_to_sizes(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Split a batch in proportion to shares, with at least one sample for every device.

    Raises:
        ValueError: fewer samples than devices.
    """
    if batch_size < len(shares):
        raise ValueError(
            f"a batch of {batch_size} samples cannot feed {len(shares)} devices, each needs at least one; "
            "use a larger batch or fewer devices (or drop_last=True in the loader)"
        )
    # Every device gets one sample; the rest is split by the shares.
    total = sum(shares)
    wanted = [max(0.0, batch_size * one / total - 1) for one in shares]
    return [1 + one for one in split_evenly(batch_size - len(shares), wanted if any(wanted) else shares)]


class WorkLoadPlanner:
    """Splits batches so that all devices finish together, and keeps adjusting, as :class:`Shares` does for workers.

    The speed of a device is the median of its last few measurements of seconds per sample, so a single slow batch
    changes nothing. A share in proportion to speed has its fixed point where all devices take equally long, even if
    every batch has a fixed cost beside the cost per sample. The split changes only when that makes a batch noticeably
    shorter, because batches of constant shape are faster.
    """

    def __init__(self, num_devices: int) -> None:
        self._seconds: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(num_devices)]
        self._shares = Shares(_PARTS, [1] * num_devices)
        self._observed = 0

    @property
    def shares(self) -> tuple[float, ...]:
        """The current share of each device; they sum to 1."""
        return tuple(one / _PARTS for one in self._shares.samples.values())

    def sizes(self, batch_size: int) -> list[int]:
        """Return samples per device for a batch.

        Raises:
            ValueError: fewer samples than devices.
        """
        return shares_to_sizes(batch_size, self.shares)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Record the time of each device for one batch. The first one is not used: it includes allocations."""
        self._observed += 1
        if self._observed <= _WARM_UP:
            return
        for last, size, duration in zip(self._seconds, sizes, seconds, strict=True):
            last.append(duration / size)
        self._shares.revise({device: Speed(0.0, statistics.median(last)) for device, last in enumerate(self._seconds)})


class Slicer:
    """Cuts batches by fixed weights, one per device, or equal ones (None), or by measured speed (``"auto"``).

    Raises:
        ValueError: the weights do not match the devices.
    """

    def __init__(self, contexts: Sequence[Context], work_load: WorkLoad) -> None:
        self._contexts = contexts
        self.planner = WorkLoadPlanner(len(contexts)) if isinstance(work_load, str) else None
        if isinstance(work_load, str) and work_load != "auto":
            raise ValueError(f"work_load_list is {work_load!r}; give one weight per device, or 'auto'")
        self._weights = [1.0] * len(contexts) if work_load is None or isinstance(work_load, str) else list(work_load)
        if len(self._weights) != len(contexts):
            raise ValueError(f"work_load_list has {len(self._weights)} weights for {len(contexts)} devices")
        work_load_sizes(10**9, self._weights)

    def sizes(self, batch_size: int) -> list[int]:
        """Return samples per device.

        Raises:
            ValueError: a device would get no sample.
        """
        if self.planner is not None:
            return self.planner.sizes(batch_size)
        return work_load_sizes(batch_size, self._weights)

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Return a tensor's slices on their devices; for a tuple or list, tuples of slices."""
        if isinstance(batch, tuple | list):
            return list(zip(*(self.cut(one, sizes) for one in batch), strict=True))
        parts = torch.split(as_tensor(batch), list(sizes))
        return [moved(part, one) for part, one in zip(parts, self._contexts, strict=True)]


def clock(context: Context, exact: bool) -> float:
    """Return the time in seconds; with ``exact``, after a GPU has finished all work given to it."""
    if exact and context.device_type == "gpu":
        torch.cuda.synchronize(context.device)
    return time.perf_counter()


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor.

    Raises:
        TypeError: it holds no tensors.
    """
    while isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not hasattr(batch, "__len__") or isinstance(batch, str | bytes | dict):
        raise TypeError(
            f"a batch of {type(batch).__name__} has no samples; data and labels are tensors or tuples of them"
        )
    return len(batch)
