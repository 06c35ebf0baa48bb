"""CIFAR-10 and CIFAR-100 in their binary form (the Python form would have to be unpickled)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from paceline.data.files import Bytes, check_labels, locate, read_bytes
from paceline.data.images import ImageDataset
from paceline.errors import DataError

_PIXELS = 3 * 32 * 32
_SOURCE = "https://www.cs.toronto.edu/~kriz"


class CIFAR10(ImageDataset):
    """Colour images of 10 classes: images [N, 3, 32, 32] float32 in 0 to 1, labels [N] int64.

    Reads ``data_batch_1.bin`` to ``data_batch_5.bin`` or ``test_batch.bin`` from ``data_dir`` or its
    ``cifar-10-batches-bin``: 50,000 samples for training, 10,000 for tests. Arguments and errors are those of
    :class:`~paceline.data.images.ImageDataset`.
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
        num_parts: keep only one of so many contiguous parts, whose sizes differ by at most one.
        part_index: which part.
        coarse: labels are the 20 superclasses.

    Raises:
        DataError: a file is missing or damaged.
        ValueError: there is no such part.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        train: bool = True,
        num_parts: int = 1,
        part_index: int = 0,
        *,
        coarse: bool = False,
    ) -> None:
        self._label = 0 if coarse else 1
        super().__init__(data_dir, train, num_parts, part_index)

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
