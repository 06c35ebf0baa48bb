"""The samples that a loop trains on: whether its loader walks all of a data set, of which content, and model inputs.

| sampler of a loader | it walks |
|---|---|
| torch's, in order or in random order without replacement | all samples |
| torch's ``DistributedSampler`` with one replica, or one with an attribute ``walks_all`` that is true | all samples |
| any other; and any of an iterable data set | not known |

A walk counts that is under way when the training begins: a validation before it is over then.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

#: Elements of a tensor or a list in a data set that are looked at, evenly spaced; objects in all, and how deep.
_ELEMENTS, _OBJECTS, _DEPTH = 64, 4096, 4

#: Characters from which on a text tells data sets apart, as a path or a fingerprint does.
_LONG = 16

#: Elements of an input that are looked at. They are spread by a prime number, so that no column is looked at alone.
_SPREAD, _PRIME = 4096, 2_654_435_761


class Walk(NamedTuple):
    """What a loader walks."""

    samples: int = 0
    """Samples of the data set that it walks as a whole; 0: that is not known, or it walks a part."""
    data: bytes = b""
    """Digest of that data set, and of the batches that the loop had when it was asked for; empty: not known."""
    order: int = 0
    """Equal numbers: walks in the same order; 0: not known."""


def walk_of(iterator: Any) -> Walk:
    """Return what is walked by an iterator of a ``DataLoader``, or one with ``data``, ``sampler`` and ``taken``."""
    if hasattr(iterator, "_index_sampler"):
        indices = iterator._index_sampler
        sampler: Any = indices.sampler if type(indices) is BatchSampler else indices
        data, taken, seed = iterator._dataset, iterator._num_yielded, iterator._base_seed
    else:
        data, sampler, taken, seed = iterator.data, iterator.sampler, iterator.taken, None
    if not walks_all(sampler):
        return Walk()
    content = digest_of(data)
    return Walk(
        len(sampler),
        content and hashlib.blake2b(content + b"%d" % taken, digest_size=16).digest(),
        _order(sampler, seed),
    )


def walks_all(sampler: Any) -> bool:
    """Return whether a sampler is known to walk all samples."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if type(sampler) is DistributedSampler:
        return sampler.num_replicas == 1
    return type(sampler) is SequentialSampler or getattr(sampler, "walks_all", False) is True


def _order(sampler: Any, seed: int | None) -> int:
    if type(sampler) is not RandomSampler:
        return 1
    if sampler.generator is not None:
        seed = sampler.generator.initial_seed()
    return 0 if seed is None else 2 + seed % 2**48


# ---- content ---------------------------------------------------------------------------------------------------------


class _Content:
    """A digest of content, and whether it has any: numbers of options alone tell no data sets apart."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.is_there = False
        self._left = _OBJECTS

    def add(self, one: Any, depth: int) -> None:
        """Add an object, if it is plain data or holds such."""
        self._left -= 1
        if self._left < 0:
            return
        if isinstance(one, torch.Tensor | np.ndarray):
            self._add_array(one)
        elif isinstance(one, str | bytes | os.PathLike):
            text = os.fspath(one)
            self.add_text(text)
            self.is_there |= len(text) >= _LONG
        elif isinstance(one, bool | int | float | None):
            self.add_text(repr(one))
        elif depth and isinstance(one, list | tuple | range):
            self.add_text(str(len(one)))
            self.is_there |= len(one) > _LONG
            for part in _spread(one):
                self.add(part, depth - 1)
        elif depth and isinstance(one, dict):
            self._add_items(one, depth)
        elif depth and hasattr(one, "__dict__") and not callable(one):
            self._add_items(vars(one), depth)

    def _add_items(self, items: dict[Any, Any], depth: int) -> None:
        self.add_text(str(len(items)))
        for name in islice(items, _ELEMENTS):
            self.add_text(str(name))
            self.add(items[name], depth - 1)

    def _add_array(self, one: torch.Tensor | np.ndarray[Any, Any]) -> None:
        self.add_text(f"{tuple(one.shape)} {one.dtype}")
        values = _some(one)
        self.hash.update(values)
        self.is_there |= len(values) > _LONG

    def add_text(self, text: str | bytes) -> None:
        """Add a text."""
        self.hash.update(text if isinstance(text, bytes) else text.encode(errors="replace"))
        self.hash.update(b"\0")


def digest_of(data: Any) -> bytes:
    """Return a digest of the content of a data set, from some of it; empty: none was found.

    Samples themselves are not made: that may take long, and be random.
    """
    content = _Content()
    content.add_text(type(data).__qualname__)
    content.add(data, _DEPTH)
    return content.hash.digest() if content.is_there else b""


def _spread(values: Sequence[Any]) -> Iterable[Any]:
    return (values[at] for at in range(0, len(values), max(1, len(values) // _ELEMENTS)))


def _some(one: torch.Tensor | np.ndarray[Any, Any]) -> bytes:
    """Return some elements of an array in this process's memory, or in a file; empty: it is another kind."""
    if isinstance(one, np.ndarray):
        is_plain = one.dtype.kind in "iufb" and one.size
        return bytes(np.asarray(one.flat[:: max(1, one.size // _ELEMENTS)]).tobytes()) if is_plain else b""
    if one.layout is not torch.strided or one.device.type != "cpu" or one.is_quantized or not one.numel():
        return b""
    positions = torch.arange(0, one.numel(), max(1, one.numel() // _ELEMENTS), dtype=torch.int64, device="cpu")
    return _bytes(one.detach().take(positions))


def _bytes(some: torch.Tensor) -> bytes:
    return some.contiguous().view(torch.uint8).cpu().numpy().tobytes()


# ---- inputs of models ------------------------------------------------------------------------------------------------


def checksum_of(inputs: Iterable[torch.Tensor], before: int) -> int:
    """Return a checksum of the inputs of a call of a model, which goes on from the checksum of the call before.

    Raises:
        ValueError: they cannot be read.
    """
    for one in inputs:
        if one.layout is not torch.strided or one.is_meta or one.is_quantized or one.is_nested:
            raise ValueError(f"a tensor of {one.layout} cannot be compared")
        if one.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("a graph of CUDA is recorded")
        before = zlib.crc32(repr(tuple(one.shape)).encode(), before)
        if one.numel():
            positions = torch.arange(min(_SPREAD, one.numel()), device=one.device) * _PRIME % one.numel()
            before = zlib.crc32(_bytes(one.detach().take(positions)), before)
    return before
