"""Readers of MNIST and CIFAR from their files, for tensors in memory: ``MNIST(data_dir, train=True)``; and the place of
data that packages ship."""

from __future__ import annotations

import abc
import gzip
import importlib.util
import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import ArrayDataset

Bytes = NDArray[np.uint8]


_FOLDERS = ("", "MNIST/raw")  # the second is where torchvision keeps them
_UNSIGNED_BYTE = 0x08
_PIXELS = 3 * 32 * 32
_SOURCE = "https://www.cs.toronto.edu/~kriz"


class DataError(Exception):
    """A file is missing or damaged."""


def packaged(package: str, path: str, otherwise: str) -> Path:
    """Return a file of an installed package, which is not imported.

    Raises:
        SystemExit: it is not there; the text ends with ``otherwise``.
    """
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (file := Path(folder, path)).is_file():
            return file
    raise SystemExit(
        f"{Path(path).name} of package {package} is not here: pip install --no-deps {package}, or {otherwise}"
    )


class ImageDataset(ArrayDataset, abc.ABC):
    """Images [N, channels, height, width] float32 in 0 to 1, and labels [N] int64.

    Args:
        data_dir: where the files are.
        train: the training samples rather than the test samples.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, data_dir: str | os.PathLike[str], train: bool = True) -> None:
        pixels, labels = self._read(data_dir, train)
        super().__init__(torch.tensor(pixels).to(torch.float32).div_(255), torch.tensor(labels).to(torch.int64))

    @abc.abstractmethod
    def _read(self, data_dir: str | os.PathLike[str], train: bool) -> tuple[Bytes, Bytes]:
        """Return all pixels, [N, channels, height, width], and all labels, [N]; raises DataError."""


class MNIST(ImageDataset):
    """Handwritten digits: images [N, 1, 28, 28] float32 in 0 to 1, labels [N] int64.

    Reads ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and their ``t10k-`` fellows, plain or ``.gz``, from
    ``data_dir`` or its ``MNIST/raw``: 60,000 samples for training, 10,000 for tests. Arguments and errors are those of
    :class:`ImageDataset`.
    """

    def _read(self, data_dir: str | os.PathLike[str], train: bool) -> tuple[Bytes, Bytes]:
        prefix = "train" if train else "t10k"
        images_path, labels_path = (_locate(data_dir, f"{prefix}-{kind}") for kind in ("images-idx3", "labels-idx1"))
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if images.shape[1:] != (28, 28):
            raise DataError(f"{images_path} is damaged: its images are {images.shape[1]}x{images.shape[2]}, not 28x28")
        if len(images) != len(labels):
            raise DataError(f"{labels_path} has {len(labels)} labels for {len(images)} images; fetch both files again")
        check_labels(labels_path, labels, num_classes=10)
        return images[:, None], labels


def _locate(data_dir: str | os.PathLike[str], stem: str) -> Path:
    name = f"{stem}-ubyte"
    advice = "put MNIST's four files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... there, plain or .gz"
    return locate(data_dir, _FOLDERS, (name, f"{name}.gz"), advice)


def read_idx(path: Path, ndim: int) -> Bytes:
    """Read an IDX file of unsigned bytes with ``ndim`` dimensions.

    The format: two zero bytes, the type (8 = unsigned byte), the number of dimensions, the dimensions as big-endian
    32-bit numbers, the values.

    Raises:
        DataError: the file cannot be read, or its magic number, dimensions or size are wrong.
    """
    data = read_bytes(path)
    magic, header_bytes = data[:4].tobytes(), 4 + 4 * ndim
    expected = bytes((0, 0, _UNSIGNED_BYTE, ndim))
    if magic != expected:
        raise DataError(f"{path} is damaged: it begins with {magic.hex() or 'nothing'}, not {expected.hex()}")
    if data.size < header_bytes:
        raise DataError(f"{path} is damaged: it ends in its header, after {data.size} bytes; fetch the file again")
    shape = struct.unpack(f">{ndim}I", data[4:header_bytes].tobytes())
    if data.size != header_bytes + math.prod(shape):
        size = " x ".join(map(str, shape))
        raise DataError(f"{path} is damaged: {data.size} bytes do not hold {size} values; fetch the file again")
    return data[header_bytes:].reshape(shape)


class CIFAR10(ImageDataset):
    """Colour images of 10 classes: images [N, 3, 32, 32] float32 in 0 to 1, labels [N] int64.

    Reads ``data_batch_1.bin`` to ``data_batch_5.bin`` or ``test_batch.bin`` from ``data_dir`` or its
    ``cifar-10-batches-bin``: 50,000 samples for training, 10,000 for tests. Arguments and errors are those of
    :class:`ImageDataset`.
    """

    def _read(self, data_dir: str | os.PathLike[str], train: bool) -> tuple[Bytes, Bytes]:
        names = [f"data_batch_{number}.bin" for number in range(1, 6)] if train else ["test_batch.bin"]
        folder, advice = "cifar-10-batches-bin", f"extract {_SOURCE}/cifar-10-binary.tar.gz there"
        paths = [locate(data_dir, ("", folder), [name], advice) for name in names]
        records = np.concatenate([read_records(path, num_labels=1, num_classes=10) for path in paths])
        return _pixels(records), records[:, 0]


class CIFAR100(ImageDataset):
    """Colour images of 100 classes: images [N, 3, 32, 32] float32 in 0 to 1, labels [N] int64.

    Reads ``train.bin`` or ``test.bin`` from ``data_dir`` or its ``cifar-100-binary``.

    Args:
        data_dir: where the files are.
        train: the 50,000 training samples rather than the 10,000 test samples.
        coarse: labels are the 20 superclasses.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, data_dir: str | os.PathLike[str], train: bool = True, *, coarse: bool = False) -> None:
        self._label = 0 if coarse else 1
        super().__init__(data_dir, train)

    def _read(self, data_dir: str | os.PathLike[str], train: bool) -> tuple[Bytes, Bytes]:
        advice = f"extract {_SOURCE}/cifar-100-binary.tar.gz there"
        path = locate(data_dir, ("", "cifar-100-binary"), ["train.bin" if train else "test.bin"], advice)
        records = read_records(path, num_labels=2, num_classes=100)
        return _pixels(records), records[:, self._label]


def read_records(path: Path, num_labels: int, num_classes: int) -> Bytes:
    """Read records of ``num_labels`` label bytes and 3072 pixel bytes: uint8 [N, num_labels + 3072].

    Raises:
        DataError: the file cannot be read, is cut off, or holds a label outside the classes.
    """
    data, record_bytes = read_bytes(path), num_labels + _PIXELS
    if not data.size or data.size % record_bytes:
        raise DataError(
            f"{path} is damaged: {data.size} bytes are not whole records of {record_bytes} bytes; fetch the file again"
        )
    records = data.reshape(-1, record_bytes)
    check_labels(path, records[:, num_labels - 1], num_classes)
    return records


def _pixels(records: Bytes) -> Bytes:
    return records[:, -_PIXELS:].reshape(-1, 3, 32, 32)


def locate(data_dir: str | os.PathLike[str], folders: Iterable[str], names: Sequence[str], advice: str) -> Path:
    """Return the first existing ``data_dir/folder/name``.

    Raises:
        DataError: there is none; the text ends with ``advice``.
    """
    for folder in folders:
        for name in names:
            path = Path(data_dir, folder, name)
            if path.is_file():
                return path
    raise DataError(f"{names[0]} is not in {Path(data_dir).absolute()}: {advice}")


def read_bytes(path: Path) -> Bytes:
    """Return the bytes of a file, unpacked when its name ends in ``.gz``.

    Raises:
        DataError: the file cannot be read or unpacked.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch the file again") from error
    return np.frombuffer(data, dtype=np.uint8)


def check_labels(path: Path, labels: Bytes, num_classes: int) -> None:
    """Refuse labels outside the classes.

    Raises:
        DataError: naming the file, the first such label and its sample.
    """
    wrong = np.flatnonzero(labels >= num_classes)
    if wrong.size:
        sample = int(wrong[0])
        raise DataError(f"{path} is damaged: label {labels[sample]} of sample {sample} is not 0 to {num_classes - 1}")
