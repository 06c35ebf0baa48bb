"""MNIST, and whatever else comes in its four IDX files (Fashion-MNIST, KMNIST)."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

from paceline.data.files import Bytes, check_labels, locate, read_bytes
from paceline.data.images import ImageDataset
from paceline.errors import DataError

_FOLDERS = ("", "MNIST/raw")  # the second is where torchvision keeps them
_UNSIGNED_BYTE = 0x08


class MNIST(ImageDataset):
    """Handwritten digits: images [N, 1, 28, 28] float32 in 0 to 1, labels [N] int64.

    Reads ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and their ``t10k-`` fellows, plain or ``.gz``, from
    ``data_dir`` or its ``MNIST/raw``: 60,000 samples for training, 10,000 for tests. Arguments and errors are those of
    :class:`~paceline.data.images.ImageDataset`.
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
