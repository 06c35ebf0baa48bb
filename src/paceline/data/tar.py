"""Shards in WebDataset's form: tar archives whose files of one name make a sample: ``dog/7.jpg`` and ``dog/7.cls``.

The files of a sample stand one after the other. The key is the path up to the first dot of the file's name; what
follows is the extension. Archives are read from their beginning to their end, without seeking, so a pipe will do.

Python's :mod:`tarfile` writes the archives, but does not read them: in streaming mode it ends without a word at a
damaged header or at a cut between two files, as if the archive ended there, and parsing its headers takes longer than
opening a file (``python -m benchmarks.readers``). The forms read are POSIX's (ustar, pax) and GNU's.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.shards import Shards
from paceline.errors import PacelineError

Sample = dict[str, Any]

_BLOCK = tarfile.BLOCKSIZE
_ZEROS = bytes(_BLOCK)
_ADLER = 65521
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")
_FILES = frozenset(tarfile.REGULAR_TYPES)
_IMAGES = {"jpg", "jpeg", "png", "webp", "ppm", "pgm"}
#: Read in one go.
_BUFFER_BYTES = 1 << 20
#: Largest file of a sample. A header says the size before the bytes come, and memory is taken for it.
_MAX_FILE_BYTES = 1 << 32


class TarSamples(IterableDataset[Any]):
    """The samples of tar archives, in order: dicts of bytes by extension, with ``__key__`` and ``__url__``.

    In a ``DataLoader`` with workers every process reads archives of its own. Where there are fewer archives than
    processes, each process reads all of them and decodes every n-th sample. Archives that :func:`paceline.data.shards`
    deals are always read whole by one process.

    Args:
        urls: paths of archives, or the result of :func:`paceline.data.shards`.
        decode: makes the loop's sample from a read one, in the process that reads, such as :func:`decoded`.
        opener: opens a path or URL to read bytes: ``gzip.open`` for archives that are compressed, ``fsspec``'s ``open``
            for remote ones. By default files are opened.

    Raises:
        TypeError: ``urls`` is one string.
    """

    def __init__(
        self,
        urls: Iterable[str | os.PathLike[str]],
        decode: Callable[[Sample], Any] | None = None,
        *,
        opener: Callable[[str], BinaryIO] | None = None,
    ) -> None:
        if isinstance(urls, str):
            raise TypeError(f"urls is one string, {urls!r}; give a list: [{urls!r}]")
        self.urls: Shards | list[str] = urls if isinstance(urls, Shards) else [os.fspath(one) for one in urls]
        self._decode, self._opener = decode, opener or _open

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples.

        Raises:
            PacelineError: an archive cannot be read, or is damaged or cut off; the text names it and the byte.
        """
        samples = self._samples()
        return samples if self._decode is None else map(self._decode, samples)

    def _samples(self) -> Iterator[Sample]:
        process = get_worker_info()
        if isinstance(self.urls, Shards) or process is None:
            return self._read(self.urls)
        if len(self.urls) >= process.num_workers:
            return self._read(self.urls[process.id :: process.num_workers])
        return islice(self._read(self.urls), process.id, None, process.num_workers)

    def _read(self, urls: Iterable[str]) -> Iterator[Sample]:
        for url in urls:
            try:
                file = self._opener(url)
            except OSError as error:
                raise PacelineError(f"{url} cannot be read: {error.strerror or error}") from error
            with file:
                yield from grouped(Archive(file, url))


def _open(url: str) -> BinaryIO:
    return open(url, "rb", buffering=_BUFFER_BYTES)


def decoded(sample: Mapping[str, Any]) -> Sample:
    """Return a sample with images as tensors, classes as numbers, texts as ``str`` and JSON as its value.

    Images are uint8 [3, height, width]; without Pillow they stay bytes. Other extensions stay bytes, too.
    """
    return {name: _decoded(name.rpartition(".")[2], value) for name, value in sample.items()}


def _decoded(kind: str, value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    if kind in _IMAGES:
        return _image(value)
    if kind in ("cls", "index", "id"):
        return int(value)
    if kind == "json":
        return json.loads(value)
    return value.decode() if kind in ("txt", "text") else value


def _image(file: bytes) -> torch.Tensor | bytes:
    try:
        from PIL import Image
    except ImportError:
        return file
    with Image.open(io.BytesIO(file)) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


# ---- reading ---------------------------------------------------------------------------------------------------------


def _parse(block: bytes) -> tuple[str, int, bytes]:
    """Return the name, size and type that a header says."""
    # The checksum counts its own eight bytes as spaces. Half of an Adler-32 is a sum, made in C: sum() takes 5 us.
    field = block[148:156]
    others = (zlib.adler32(block) & 0xFFFF) - (zlib.adler32(field) & 0xFFFF)
    if (_octal(field) - 8 * ord(" ") - others) % _ADLER:
        raise ValueError("the checksum is wrong")
    name, kind = _text(block[:100]), block[156:157]
    if block[345] and block[257:263] == b"ustar\0":
        name = f"{_text(block[345:500])}/{name}"
    if kind == tarfile.AREGTYPE and name.endswith("/"):
        kind = tarfile.DIRTYPE
    is_large = block[124] == 0x80  # GNU's form of 8 GiB and more
    return name, int.from_bytes(block[125:136]) if is_large else _octal(block[124:136]), kind


def _octal(field: bytes) -> int:
    return int(field.strip(b" \0") or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


class Archive:
    """The files of a tar archive, in order: name and bytes. To be read once.

    Args:
        file: at its beginning.
        url: its name, for errors.
        places: yield (offset, size) of each file's bytes, not the bytes: of a file that can be sought in, only the
            headers are read.

    Attributes:
        offset: bytes that were read.
        start: where the header of the last file begins.
    """

    def __init__(self, file: BinaryIO, url: str, *, places: bool = False) -> None:
        self._file, self.url, self._places = file, url, places
        self.offset = self.start = self._padding = 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield name and bytes (or place) of each file; folders are left out.

        Raises:
            PacelineError: the archive is damaged or cut off.
        """
        extended: dict[str, str] = {}
        while (member := self._header()) is not None:
            name, size, kind = member
            if extended:
                name, size = extended.get("path", name), int(extended.get("size", size))
            if not 0 <= size <= _MAX_FILE_BYTES:
                raise self.damage(f"{name} has {size} bytes; at most {_MAX_FILE_BYTES} are read")
            is_file = kind in _FILES
            data = self._skip(size) if is_file and self._places else self._read(size)
            self._padding = -size % _BLOCK
            if is_file and not (extended and any(one.startswith("GNU.sparse") for one in extended)):
                yield name, data
                extended = {}
            elif kind == tarfile.XHDTYPE and isinstance(data, bytes):
                extended = self._records(data)
            elif kind == tarfile.GNUTYPE_LONGNAME and isinstance(data, bytes):
                extended = {"path": data.rstrip(b"\0").decode(errors="surrogateescape")}
            elif kind == tarfile.DIRTYPE:
                extended = {}
            elif kind not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
                raise self.damage(f"{name} is a link or no plain file; write the archive again with plain files")

    def damage(self, text: str) -> PacelineError:
        """Return an error about the last file."""
        return PacelineError(f"{self.url}, at byte {self.start}: {text}")

    def _header(self) -> tuple[str, int, bytes] | None:
        """Return the next header; None: the archive ends here, as it should."""
        self.start = self.offset + self._padding
        block = self._read(self._padding + _BLOCK)[self._padding :]
        if block == _ZEROS:
            return None
        try:
            return _parse(block)
        except ValueError as error:
            text = "the archive is damaged: no file begins here; make it again"
            raise self.damage(text if self.start else "this is no tar archive") from error

    def _skip(self, size: int) -> tuple[int, int]:
        place = self.offset, size
        self._file.seek(size, os.SEEK_CUR)
        self.offset += size
        return place

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.offset += len(data)
        if not self.start and self.offset == len(data) and data.startswith(b"\x1f\x8b"):
            raise self.damage("this is a compressed archive; give opener=gzip.open")
        if len(data) != size:
            raise self.damage(
                f"the archive is cut off: it ends at byte {self.offset}, without a mark of its end; copy it again"
            )
        return data

    def _records(self, data: bytes) -> dict[str, str]:
        """Return the records of an extended header: "length name=value" and a line feed each (POSIX.1-2001)."""
        found, begin = {}, 0
        while begin < len(data):
            digits = data[begin : data.find(b" ", begin)]
            end = begin + (int(digits) if digits.isdigit() else 0)
            if end <= begin or data[end - 1 : end] != b"\n":
                raise self.damage("the extended header is damaged; make the archive again")
            record = data[begin + len(digits) + 1 : end - 1].decode(errors="surrogateescape")
            name, _, found[name] = record.partition("=")
            begin = end
        if not found.get("size", "0").isdecimal():
            raise self.damage("the extended header has no valid size; make the archive again")
        return found


def grouped(archive: Archive) -> Iterator[Sample]:
    """Yield the samples of an archive: files in a row with one key. Files without an extension belong to none.

    Raises:
        PacelineError: the archive is damaged, or a sample has two files of one extension.
    """
    sample: Sample = {}
    for name, data in archive:
        parts = _NAME.fullmatch(name)
        if parts is None or name.startswith("__"):
            continue
        key, extension = parts[1], parts[2].lower()
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        if extension in sample:
            raise archive.damage(f"sample {key} has a second file {extension}; files of one sample have their own")
        sample = sample or {"__key__": key, "__url__": archive.url}
        sample[extension] = data
    if sample:
        yield sample


# ---- writing ---------------------------------------------------------------------------------------------------------


class TarWriter:
    """Writes samples: ``with TarWriter("train-000000.tar") as file: file.write("7", {"jpg": image, "cls": b"3"})``.

    The same samples make the same bytes: files have no time and no owner.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._archive = tarfile.open(path, "w")  # noqa: SIM115
        self._last = ""

    def write(self, key: str, files: Mapping[str, bytes]) -> None:
        """Append a sample.

        Args:
            key: without a dot behind its last slash, and not that of the sample before.
            files: bytes by extension.

        Raises:
            ValueError: a reader would not find this key or these extensions again.
        """
        for extension in files:
            parts = _NAME.fullmatch(f"{key}.{extension}")
            if parts is None or (parts[1], parts[2].lower()) != (key, extension) or key.startswith("__"):
                raise ValueError(f"{key}.{extension} does not read as key {key!r} and extension {extension!r}")
        if key == self._last or not files:
            raise ValueError(f"sample {key!r} has no files, or is the key of the sample before")
        for extension, data in files.items():
            member = tarfile.TarInfo(f"{key}.{extension}")
            member.size = len(data)
            self._archive.addfile(member, io.BytesIO(data))
        self._last = key

    def close(self) -> None:
        """Write the mark of the end, and close the file."""
        self._archive.close()

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
