"""Marks tensors with the replica that they belong to. Logical CPUs share one ``torch.device``, so it does not tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.mx.context import Context, ContextLike, as_context

T = TypeVar("T")

# A table beside the tensors: saved or copied tensors have no extra attributes.
_contexts = WeakTensorKeyDictionary()


def as_in_context(tensor: torch.Tensor, ctx: ContextLike) -> torch.Tensor:
    """Return a tensor on a device; a replicated network runs it on the replica of that device.

    Tensors that torch makes from it (``x.float()``, ``x.view(...)``) belong to no replica; call this again on them.

    Args:
        tensor: any tensor; it is not changed. It is not copied if it is on the device already.
        ctx: the device.
    """
    context = as_context(ctx)
    moved = tensor.to(context.device, non_blocking=True)
    return mark(moved.view_as(moved) if moved is tensor else moved, context)


def mark(value: T, context: Context) -> T:
    """Mark all tensors in a value with their device; returns the value."""
    for one in _tensors(value):
        _contexts[one] = context
    return value


def index_of(inputs: Sequence[Any], contexts: Sequence[Context]) -> int:
    """Return the index of the replica that inputs belong to: by mark or GPU, else the first replica.

    Args:
        inputs: tensors, or tuples, lists and dictionaries of them; other values are ignored.
        contexts: the replicas' devices.

    Raises:
        ValueError: inputs of one call belong to different replicas.
    """
    tensors = [tensor for one in inputs for tensor in _tensors(one)]
    marked = {_contexts[one]: None for one in tensors if one in _contexts and _contexts[one] in contexts}
    if len(marked) > 1:
        raise ValueError(f"the inputs of one call are slices of {' and '.join(map(str, marked))}; give those of one")
    if marked:
        return contexts.index(next(iter(marked)))
    devices = [one.device for one in tensors]
    return next((index for index, one in enumerate(contexts) if one.device in devices), 0)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, tuple | list) else []
