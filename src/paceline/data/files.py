"""What readers of data sets in files share: they find the files, read them and check the labels."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

Bytes = NDArray[np.uint8]


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
