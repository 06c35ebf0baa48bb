"""Splitting a batch over devices, and MXNet's place of ``clip_global_norm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from paceline.layout.tensors import as_tensor
from paceline.mx.context import ContextLike, as_contexts, as_in_context, moved
from paceline.mx.gluon.clip import clip_global_norm

#: Data that can be split: a tensor, a numpy array, or anything that ``torch.as_tensor`` accepts.
ArrayLike: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]

__all__ = ["clip_global_norm", "split_and_load", "split_data", "work_load_sizes"]


def work_load_sizes(batch_size: int, work_load_list: Sequence[float]) -> list[int]:
    """Split a batch in proportion to weights, as MXNet's ``work_load_list`` does.

    Every device gets ``round(batch * weight / sum(weights))`` samples (halves are rounded to the even number). Missing
    samples are added to the last device; surplus samples are removed from the end.

    Args:
        batch_size: samples in the batch.
        work_load_list: one weight above 0 per device.

    Returns:
        Samples per device; they sum to ``batch_size``.

    Raises:
        ValueError: a weight is not above 0, or a device would get no sample.
    """
    weights = [float(one) for one in work_load_list]
    if not weights or not all(0 < one < float("inf") for one in weights):
        raise ValueError(f"work_load_list {list(work_load_list)} needs one finite weight above 0 per device")
    total = sum(weights)
    sizes = [round(batch_size * one / total) for one in weights]
    sizes[-1] += max(0, batch_size - sum(sizes))
    stops = [min(batch_size, sum(sizes[: i + 1])) for i in range(len(sizes))]
    sizes = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
    if min(sizes) < 1:
        raise ValueError(
            f"a batch of {batch_size} over weights {list(work_load_list)} gives slices {sizes}: every device needs at "
            "least one sample; use a larger batch, fewer devices or more even weights (or drop_last=True in the loader)"
        )
    return sizes


def split_data(data: ArrayLike, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[torch.Tensor]:
    """Cut a batch into ``num_slice`` slices along ``batch_axis``. Slices are views, not copies.

    Args:
        data: a tensor or array.
        num_slice: number of slices.
        batch_axis: the axis that counts samples.
        even_split: require slices of one size. Otherwise the first ``size % num_slice`` slices get one sample more, and
            if a batch has fewer samples than slices, the last slices are empty.

    Raises:
        ValueError: the batch is not divisible.
    """
    tensor = as_tensor(data)
    size = _batch_size(tensor, batch_axis)
    if num_slice < 1:
        raise ValueError(f"num_slice is {num_slice}; it must be at least 1")
    if even_split and size < num_slice:
        raise ValueError(
            f"a batch of {size} samples cannot feed {num_slice} devices, each needs at least one; use a larger batch "
            "or fewer devices (or drop_last=True in the loader), or even_split=False for empty slices"
        )
    small, extra = divmod(size, num_slice)
    if even_split and extra:
        raise ValueError(
            f"a batch of {size} samples does not divide over {num_slice} devices: use a multiple of {num_slice}, "
            "or even_split=False for slices that differ by one sample"
        )
    return list(torch.split(tensor, [small + (i < extra) for i in range(num_slice)], dim=batch_axis))


def split_and_load(
    data: ArrayLike,
    ctx_list: ContextLike | Sequence[ContextLike],
    batch_axis: int = 0,
    even_split: bool = True,
    work_load_list: Sequence[float] | None = None,
) -> list[torch.Tensor]:
    """Cut a batch into one slice per device and put every slice on its device.

    Args:
        data: a tensor or array.
        ctx_list: one device, or a list of them.
        batch_axis: the axis that counts samples.
        even_split: see :func:`split_data`.
        work_load_list: weights of unequal devices (see :func:`work_load_sizes`); they replace ``even_split``.

    Returns:
        One tensor per device. On a CPU it is a view of ``data``, elsewhere a copy. The slices are marked: a replicated
        network that is called with one slice runs the replica of its device.

    Raises:
        ValueError: the batch cannot be split this way, or the number of weights is not the number of devices.
    """
    contexts = as_contexts(ctx_list)
    tensor = as_tensor(data)
    if work_load_list is None:
        slices = [tensor] if len(contexts) == 1 else split_data(tensor, len(contexts), batch_axis, even_split)
    elif len(work_load_list) != len(contexts):
        raise ValueError(f"work_load_list has {len(work_load_list)} weights for {len(contexts)} devices")
    else:
        sizes = work_load_sizes(_batch_size(tensor, batch_axis), work_load_list)
        slices = list(torch.split(tensor, sizes, dim=batch_axis))
    if len(contexts) == 1:
        return [moved(slices[0], contexts[0])]
    return [as_in_context(part, one) for part, one in zip(slices, contexts, strict=True)]


def _batch_size(tensor: torch.Tensor, batch_axis: int) -> int:
    if not -tensor.dim() <= batch_axis < tensor.dim():
        raise ValueError(f"data of shape {tuple(tensor.shape)} has no batch axis {batch_axis}")
    return int(tensor.shape[batch_axis])
