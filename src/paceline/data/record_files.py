"""RecordIO: MXNet's files of records (``.rec``), with an index of their places (``.idx``).

A record is written as one or more parts: the magic number 0xced7230a, 29 bits of length with 3 bits of a flag above,
the bytes, and zeros up to a multiple of four. The flag says which part it is: 0 the whole record, 1 the first, 2 one
in between, 3 the last. A record is cut where it holds the magic number itself, which is left out there. The format is
dmlc-core's, and so is that of image records: a header (flag, label, id, id2) and an encoded image (``im2rec``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from paceline.errors import PacelineError

_MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_HEAD = struct.Struct("<II")
_IMAGE_HEADER = struct.Struct("<IfQQ")
_LABEL = struct.Struct("<f")
#: Bytes of an image record up to the first of its labels that stand behind the header.
_FIRST_LABELS = _IMAGE_HEADER.size + _LABEL.size
_LONGEST = (1 << 29) - 1
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


class ImageHeader(NamedTuple):
    """The header of an image in its record: labels (usually one), and the image's numbers."""

    labels: tuple[float, ...]
    id: int = 0
    id2: int = 0


def pack(header: ImageHeader, image: bytes) -> bytes:
    """Return an image record. One label is stored in the header, several behind it."""
    if len(header.labels) == 1:
        return _IMAGE_HEADER.pack(0, header.labels[0], header.id, header.id2) + image
    labels = np.asarray(header.labels, "<f4").tobytes()
    return _IMAGE_HEADER.pack(len(header.labels), 0.0, header.id, header.id2) + labels + image


def unpack(record: bytes) -> tuple[ImageHeader, bytes]:
    """Return the header of an image record, and the encoded image.

    Raises:
        PacelineError: the record is too short for its header.
    """
    if len(record) < _IMAGE_HEADER.size:
        raise PacelineError(
            f"a record of {len(record)} bytes is no image record: its header alone has {_IMAGE_HEADER.size}"
        )
    count, label, number, second = _IMAGE_HEADER.unpack_from(record)
    end = _IMAGE_HEADER.size + 4 * count
    if len(record) < end:
        raise PacelineError(
            f"a record of {len(record)} bytes is no image record: its header says that {count} labels follow"
        )
    labels = tuple(map(float, np.frombuffer(record, "<f4", count, _IMAGE_HEADER.size))) if count else (label,)
    return ImageHeader(labels, number, second), record[end:]


class Records(Dataset[bytes]):
    """The records of a file, by their position in it. Reading is safe in several threads and processes.

    Args:
        path: the ``.rec`` file.
        index: the ``.idx`` file: a line "key offset" per record. By default the file beside it of the same name; if
            there is none, the heads of all records are read once.

    Attributes:
        keys: keys of the records, in the order of the file or of its index.

    Raises:
        PacelineError: a file is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], index: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path)
        self._file: tuple[int, int] | None = None
        beside = self.path.with_suffix(".idx")
        if index is None and not beside.exists():
            self._offsets = np.fromiter(self._scan(), np.int64)
            self.keys = np.arange(len(self._offsets))
        else:
            self.keys, self._offsets = _read_index(Path(index) if index is not None else beside)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, position: int) -> bytes:
        """Return one record.

        Raises:
            PacelineError: the file is damaged there.
        """
        offset, parts = int(self._offsets[position]), list[bytes]()
        while True:
            flag, length = self._head(offset)
            if (flag in (_WHOLE, _FIRST)) == bool(parts):
                text = "a part of a record stands alone; make the file and its index again"
                raise PacelineError(f"{self.path} is damaged at byte {offset}: {text}")
            parts.append(self._read(length, offset + _HEAD.size))
            if flag in (_WHOLE, _LAST):
                return _MAGIC_BYTES.join(parts)
            offset += _HEAD.size + _padded(length)

    def label(self, position: int) -> float:
        """Return the first label of an image record, without reading the image.

        Raises:
            PacelineError: the file is damaged there, or the record is no image record.
        """
        offset = int(self._offsets[position])
        flag, length = self._head(offset)
        if flag != _WHOLE or length < _FIRST_LABELS:
            return unpack(self[position])[0].labels[0]
        start = self._read(_FIRST_LABELS, offset + _HEAD.size)
        count, label, _, _ = _IMAGE_HEADER.unpack_from(start)
        return float(_LABEL.unpack_from(start, _IMAGE_HEADER.size)[0] if count else label)

    def _scan(self) -> Iterator[int]:
        try:
            offset, end = 0, self.path.stat().st_size
        except OSError as error:
            raise PacelineError(f"{self.path} cannot be read: {error.strerror}") from error
        while offset < end:
            flag, length = self._head(offset)
            if flag in (_WHOLE, _FIRST):
                yield offset
            offset += _HEAD.size + _padded(length)

    def _head(self, offset: int) -> tuple[int, int]:
        magic, word = _HEAD.unpack(self._read(_HEAD.size, offset)) if offset >= 0 else (0, 0)
        if magic != _MAGIC:
            raise PacelineError(f"{self.path} is damaged at byte {offset}: no record begins there; make the file again")
        return word >> 29, word & _LONGEST

    def _read(self, size: int, offset: int) -> bytes:
        found = os.pread(self._descriptor(), size, offset)
        if len(found) != size:
            raise PacelineError(f"{self.path} is cut off: byte {offset + size} is behind its end; copy the file again")
        return found

    def _descriptor(self) -> int:
        # A process of a DataLoader opens the file itself; it needs a position of its own.
        if self._file is None or self._file[0] != os.getpid():
            try:
                self._file = os.getpid(), os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise PacelineError(f"{self.path} cannot be read: {error.strerror}") from error
        return self._file[1]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None}

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None and file[0] == os.getpid():
            os.close(file[1])


class RecordWriter:
    """Writes records and their index: ``with RecordWriter("train.rec") as file: file.write(record)``.

    Args:
        path: the ``.rec`` file; the index is written beside it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._records = open(path, "wb")  # noqa: SIM115
        self._index = open(Path(path).with_suffix(".idx"), "w")  # noqa: SIM115
        self._count = 0

    def write(self, record: bytes, key: int | None = None) -> None:
        """Append a record.

        Args:
            record: its bytes, less than 2**29.
            key: in the index; by default the number of the record.

        Raises:
            ValueError: the record is too long.
        """
        if len(record) > _LONGEST:
            raise ValueError(f"a record has at most {_LONGEST} bytes; this one has {len(record)}")
        self._index.write(f"{self._count if key is None else key}\t{self._records.tell()}\n")
        parts = list(_cut(record))
        for number, part in enumerate(parts):
            flag = _WHOLE
            if len(parts) > 1:
                flag = _FIRST if number == 0 else _LAST if number == len(parts) - 1 else _MIDDLE
            head = _HEAD.pack(_MAGIC, flag << 29 | len(part))
            self._records.write(head + part + bytes(_padded(len(part)) - len(part)))
        self._count += 1

    def close(self) -> None:
        """Write the buffered bytes, and close both files."""
        self._records.close()
        self._index.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(record: bytes) -> Iterator[bytes]:
    """Yield the parts of a record: it is cut where the magic number stands at a multiple of four bytes."""
    begin, found = 0, record.find(_MAGIC_BYTES)
    while found >= 0:
        if found % 4 == 0:
            yield record[begin:found]
            begin = found + 4
            found = record.find(_MAGIC_BYTES, begin)
        else:
            found = record.find(_MAGIC_BYTES, found + 1)
    yield record[begin:]


def _padded(length: int) -> int:
    return (length + 3) // 4 * 4


def _read_index(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    try:
        lines = path.read_text().split("\n")
        found = np.array([line.split("\t") for line in lines if line] or np.empty((0, 2)), np.int64)
        if found.shape != (len(found), 2):
            raise ValueError(f"{found.shape[1:]} columns")
    except OSError as error:
        raise PacelineError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, OverflowError) as error:
        raise PacelineError(f'{path} is no index: its lines are not "key<tab>offset"; make it again') from error
    return found[:, 0], found[:, 1]
