"""Cuts the batches of a ``Module``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from paceline.mx.context import Context
from paceline.mx.gluon.utils import work_load_sizes
from paceline.mx.work_load import WorkLoadPlanner

WorkLoad: TypeAlias = Sequence[float] | Literal["auto"] | None


class Slicer:
    """Cuts batches by fixed weights, or by measured speed.

    Args:
        contexts: the devices.
        work_load: one weight per device, ``"auto"`` to measure, None for equal weights.

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
        parts = torch.split(torch.as_tensor(batch), list(sizes))
        return [part.to(one.device, non_blocking=True) for part, one in zip(parts, self._contexts, strict=True)]


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
