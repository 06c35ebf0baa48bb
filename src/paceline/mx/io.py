"""MXNet's iterators over data in memory, with ``num_parts`` and ``part_index``: each worker takes its part.

A loop over an iterator is one epoch, and every loop begins anew: ``reset`` has nothing to do.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import PacelineError
from paceline.layout.tensors import as_tensor
from paceline.naming import absent

__all__ = ["DataBatch", "MNISTIter", "NDArrayIter"]


@dataclass(frozen=True)
class DataBatch:
    """One batch: its tensors, its labels, and how many samples at its end only fill it up."""

    data: list[torch.Tensor]
    label: list[torch.Tensor]
    pad: int = 0


class NDArrayIter:
    """Batches of arrays in memory.

    Args:
        data: an array of samples, or several in a list or by name.
        label: labels, the same.
        batch_size: samples per batch.
        shuffle: a new order every epoch, from ``seed`` and the number of the epoch.
        last_batch_handle: for the samples of the last batch that is not full: ``pad``: samples from the beginning of
            the epoch fill it up (``batch.pad`` tells how many); ``discard``: there is no such batch.
        num_parts: equal parts of the data, one per worker; the samples that do not divide are left out.
        part_index: which part.
        seed: seed of the order.

    Raises:
        ValueError: arrays of different lengths, a part that does not exist, less than a batch, or another handling.
    """

    def __init__(
        self,
        data: Any,
        label: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        last_batch_handle: str = "pad",
        num_parts: int = 1,
        part_index: int = 0,
        seed: int = 0,
    ) -> None:
        if last_batch_handle not in ("pad", "discard"):
            raise ValueError(f"last_batch_handle {last_batch_handle!r} is not possible: 'pad' or 'discard'")
        if not 0 <= part_index < num_parts:
            raise ValueError(f"part_index is {part_index}; it is 0 to {num_parts - 1} with num_parts={num_parts}")
        arrays = [*_listed(data), *_listed(label)]
        if len({len(one) for one in arrays}) != 1:
            raise ValueError(f"arrays of {', '.join(str(len(one)) for one in arrays)} samples; all must be as long")
        count = len(arrays[0]) // num_parts
        if not 1 <= batch_size <= count:
            raise ValueError(f"batch_size is {batch_size}, and a part has {count} samples")
        tensors = [as_tensor(one)[count * part_index : count * (part_index + 1)] for one in arrays]
        self._data, self._label = tensors[: len(_listed(data))], tensors[len(_listed(data)) :]
        self.batch_size, self.num_data, self._pads = batch_size, count, last_batch_handle == "pad"
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return math.ceil(self.num_data / self.batch_size) if self._pads else self.num_data // self.batch_size

    def __iter__(self) -> Iterator[DataBatch]:
        """Return the batches of the next epoch."""
        chance = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.arange(self.num_data, device="cpu")
        if self._shuffle:
            order = torch.randperm(self.num_data, generator=chance, device="cpu")
        self._epoch += 1
        for index in range(len(self)):
            place = torch.arange(index * self.batch_size, (index + 1) * self.batch_size, device="cpu")
            chosen = order[place % self.num_data]
            yield DataBatch(
                [one[chosen] for one in self._data],
                [one[chosen] for one in self._label],
                max(0, (index + 1) * self.batch_size - self.num_data),
            )

    def reset(self) -> None:
        """Do nothing: every loop begins anew."""


class MNISTIter(NDArrayIter):
    """Batches of MNIST's files: images [N, 1, height, width] in 0 to 1 (pixels / 256), and labels [N].

    The rest of an epoch is left out. The other arguments are the same as of :class:`NDArrayIter`.

    Args:
        image: file of images, in IDX format, plain or ``.gz``.
        label: file of labels.
        flat: images are [N, height * width].

    Raises:
        PacelineError: a file is missing or damaged.
    """

    def __init__(
        self,
        image: str | os.PathLike[str],
        label: str | os.PathLike[str],
        batch_size: int = 128,
        shuffle: bool = True,
        flat: bool = False,
        seed: int = 0,
        num_parts: int = 1,
        part_index: int = 0,
    ) -> None:
        pixels = _read_idx(image, 3).float().div_(256)
        images = pixels.flatten(1) if flat else pixels.unsqueeze(1)
        labels = _read_idx(label, 1).long()
        super().__init__(images, labels, batch_size, shuffle, "discard", num_parts, part_index, seed)


def _read_idx(path: str | os.PathLike[str], ndim: int) -> torch.Tensor:
    """Read an IDX file of bytes: 0, 0, 8, the number of axes, their lengths (big-endian, 32 bits), the values."""
    try:
        found = Path(path).read_bytes()
        found = gzip.decompress(found) if Path(path).suffix == ".gz" else found
        shape = struct.unpack_from(f">{ndim}I", found, 4)
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise PacelineError(f"{path} cannot be read as an IDX file: {error}") from error
    if found[:4] != bytes((0, 0, 8, ndim)) or len(found) != 4 + 4 * ndim + math.prod(shape):
        raise PacelineError(f"{path} is no IDX file of bytes with {ndim} axes, or is cut off; fetch it again")
    return torch.from_numpy(np.frombuffer(found, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy())


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return data and labels of a batch: a pair, or a :class:`DataBatch`, without the samples that only fill it up."""
    if not isinstance(batch, DataBatch):
        data, label = batch
        return data, label
    stop = len(batch.data[0]) - batch.pad
    data, label = ([one[:stop] for one in some] for some in (batch.data, batch.label))
    return (data[0] if len(data) == 1 else data), (label[0] if len(label) == 1 else label)


def data_of(batch: Any) -> Any:
    """Return the data of a batch: the first of a pair, or the batch itself if it is data alone."""
    if isinstance(batch, DataBatch):
        return as_pair(batch)[0]
    return batch[0] if isinstance(batch, tuple | list) else batch


def _listed(arrays: Any) -> Sequence[Any]:
    """Return a list of arrays as it is, one array as a list; numbers in lists are one array."""
    if isinstance(arrays, Mapping):  # MXNet takes them by name, and orders them so
        return [as_tensor(arrays[name]) for name in sorted(arrays)]
    several = isinstance(arrays, list | tuple) and all(isinstance(one, torch.Tensor | np.ndarray) for one in arrays)
    return [] if arrays is None else arrays if several else [as_tensor(arrays)]


if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _INSTEAD = {
        "CSVIter": "NDArrayIter(numpy.loadtxt(...))",
        "DataDesc": "nothing: shapes come from the first batch",
        "DataIter": "any iterable of (data, label)",
        "ImageRecordIter": "paceline.data.Records in a torch DataLoader, as in examples/common/imagenet.py",
        "LibSVMIter": "sklearn.datasets.load_svmlight_file",
        "PrefetchingIter": "a torch DataLoader with num_workers",
        "ResizeIter": "itertools.islice",
    }
    __getattr__ = absent(__name__, __all__, _INSTEAD)
