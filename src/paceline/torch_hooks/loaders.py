"""The samples that a loop trains on: whether its loader walks all of a data set, of which content, and model inputs.

| sampler of a ``DataLoader`` | it walks |
|---|---|
| torch's, in order or in random order without replacement | all samples |
| torch's ``DistributedSampler`` with one replica, or one with an attribute ``walks_all`` that is true | all samples |
| any other; and any of an iterable data set | not known |
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

#: Elements of a tensor or a list that are looked at, evenly spaced, and how deep objects are looked into.
_ELEMENTS, _DEPTH = 64, 4

#: Characters from which on a text tells data sets apart, as a path or a fingerprint does.
_LONG = 16


def whole_walk(loader: DataLoader[Any]) -> tuple[int, bytes]:
    """Return the length and the digest of the data set that a loader walks as a whole; (0, b""): it does not."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset) or not walks_all(_sampler_of(loader)):
        return 0, b""
    return len(data), digest_of(data)


def walks_all(sampler: Any) -> bool:
    """Return whether a sampler is known to walk all samples."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)  # type: ignore[arg-type]
    if type(sampler) is DistributedSampler:
        return sampler.num_replicas == 1
    return type(sampler) is SequentialSampler or getattr(sampler, "walks_all", False) is True


def _sampler_of(loader: DataLoader[Any]) -> Any:
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else batches or loader.sampler


# ---- content ---------------------------------------------------------------------------------------------------------


class _Content:
    """A digest of content, and whether it has any: numbers of options alone tell no data sets apart."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.is_there = False

    def add(self, one: Any, depth: int) -> None:
        """Add an object, if it is plain data or holds such."""
        if isinstance(one, torch.Tensor | np.ndarray):
            self._add_array(one)
        elif isinstance(one, str | bytes | os.PathLike):
            text = os.fspath(one)
            self._add_text(text)
            self.is_there |= len(text) >= _LONG
        elif isinstance(one, bool | int | float | None):
            self._add_text(repr(one))
        elif depth and isinstance(one, Sequence):
            self._add_text(str(len(one)))
            self.is_there |= len(one) > _LONG
            for part in _spread(one):
                self.add(part, depth - 1)
        elif depth and isinstance(one, Mapping):
            self._add_items(one, depth)
        elif depth and hasattr(one, "__dict__") and not callable(one):
            self._add_items(vars(one), depth)

    def _add_items(self, items: Mapping[Any, Any], depth: int) -> None:
        for name in _spread(list(items)):
            self._add_text(str(name))
            self.add(items[name], depth - 1)

    def _add_array(self, one: Any) -> None:
        self._add_text(f"{tuple(one.shape)} {one.dtype}")
        values = elements_of(torch.as_tensor(one)) if _is_plain(one) else b""
        self.hash.update(values)
        self.is_there |= len(values) > _LONG

    def _add_text(self, text: str | bytes) -> None:
        self.hash.update(text if isinstance(text, bytes) else text.encode(errors="replace"))
        self.hash.update(b"\0")


def digest_of(data: Any) -> bytes:
    """Return a digest of the content of a data set, from some of it; empty: none was found.

    Samples themselves are not made: that may take long, and be random.
    """
    content = _Content()
    content._add_text(type(data).__qualname__)
    content.add(data, _DEPTH)
    return content.hash.digest() if content.is_there else b""


def _spread(values: Sequence[Any]) -> Iterable[Any]:
    return (values[at] for at in range(0, len(values), max(1, len(values) // _ELEMENTS)))


def _is_plain(one: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype.kind in "iufb" and one.dtype.isnative
    return one.layout is torch.strided and not one.is_meta and not one.is_quantized and not one.is_cuda


def elements_of(tensor: torch.Tensor) -> bytes:
    """Return some elements of a strided tensor, evenly spaced."""
    flat = tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // _ELEMENTS)]
    return (torch.view_as_real(some) if some.is_complex() else some).to("cpu", torch.float64).numpy().tobytes()


def checksum_of(inputs: Iterable[torch.Tensor]) -> int | None:
    """Return a checksum of the inputs of a model; None: there are none that can be read now."""
    found, is_there = 0, False
    for one in inputs:
        if one.layout is not torch.strided or one.is_meta or one.is_quantized or one.is_nested:
            return None
        if one.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        found = zlib.crc32(elements_of(one), zlib.crc32(repr(tuple(one.shape)).encode(), found))
        is_there |= one.numel() > 1
    return found if is_there else None
