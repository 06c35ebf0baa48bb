"""What one call of a model shows of the samples in it."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: Inputs that hold at most one sample each. What is of another type, and has no shape, may hold any number.
_PLAIN = (
    str, bytes, int, float, complex, type(None), type, range, slice, FunctionType, Enum, torch.dtype, torch.device,
)  # fmt: skip


#: Characters of a text of shapes.
_LONGEST = 200


@dataclass(frozen=True, eq=False)
class Tally:
    """The samples in one call of a model, or in one batch.

    Attributes:
        samples: how many, where that is certain, else None.
        parts: shapes of the tensors, and types of all else.
        rows: a guess, for speeds only.
        opaque: type of an input whose size is not seen; empty: there is none.
    """

    samples: int | None
    parts: tuple[object, ...]
    rows: int
    opaque: str = ""


def tally(inputs: Any, batch_dim: int | None) -> Tally:
    """Return what the inputs of one call show.

    Args:
        inputs: positional and keyword inputs, nested or not.
        batch_dim: dimension that counts samples, if the user has said so.
    """
    leaves = list(_leaves(inputs))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    own = {size for size in map(_own_size, leaves) if size is not None}
    dim = batch_dim or 0
    sizes = [one.shape[dim] for one in tensors if not one.is_nested and one.dim() > dim]
    found = own if batch_dim is None else own | set(sizes)
    samples = found.pop() if len(found) == 1 else None
    if tensors and not own and not any(one.numel() for one in tensors):
        samples = 0  # nothing goes in, whatever counts samples
    rows = samples if samples is not None else next(iter([*own, *sizes]), 0)
    parts = tuple(map(_part, leaves))
    opaque = next((type(one).__name__ for one, part in zip(leaves, parts, strict=True) if part is None), "")
    return Tally(samples, parts, rows, opaque)


def tensors_in(inputs: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples, mappings and dataclasses, in order."""
    leaves = list(_leaves(inputs))
    return [one.data if isinstance(one, PackedSequence) else one for one in leaves if isinstance(one, _TENSORS)]


def hides_tensors(outputs: Any) -> bool:
    """Return whether there is an object that is not searched for tensors."""
    return any(not isinstance(leaf, (*_TENSORS, *_PLAIN)) for leaf in _leaves(outputs))


_TENSORS = (torch.Tensor, PackedSequence)


def _leaves(inputs: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(inputs, is_leaf=lambda one: isinstance(one, PackedSequence)):
        if isinstance(leaf, Mapping):
            yield from _leaves(dict(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves(vars(leaf))
        else:
            yield leaf


def _own_size(leaf: Any) -> int | None:
    """Return how many samples something has that knows it by itself."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return leaf.size(0) if isinstance(leaf, torch.Tensor) and leaf.is_nested else None


def _part(leaf: Any) -> object:
    """Return the shape of an input, or its type if it has none; None: its size is not known."""
    if isinstance(leaf, PackedSequence):
        return leaf.data.shape
    if isinstance(leaf, torch.Tensor):
        return (leaf.size(0),) if leaf.is_nested else leaf.shape
    if isinstance(leaf, _PLAIN):
        return type(leaf).__name__
    shape = getattr(leaf, "shape", None)  # of an array
    return shape if isinstance(shape, tuple) else None


def text_of(tallies: Iterable[Tally]) -> str:
    """Return the shapes of all inputs as text: the same text if and only if workers have the same shapes."""
    found = Counter(part for one in tallies for part in one.parts)
    texts = ((str(list(part)) if isinstance(part, tuple) else part, number) for part, number in found.items())
    text = ", ".join(str(part) if number == 1 else f"{number} x {part}" for part, number in texts)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (crc {zlib.crc32(text.encode()):08x})"
