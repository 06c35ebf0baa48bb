"""Tar archives in WebDataset's form."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data import TarSamples, TarWriter, decoded
from paceline.data.tar import Archive, grouped
from paceline.errors import PacelineError


def write(path: Path, count: int = 5, first: int = 0) -> str:
    with TarWriter(path) as file:
        for number in range(first, first + count):
            file.write(f"dog/{number:04}", {"txt": b"x" * number, "cls": str(number).encode()})
    return str(path)


def classes(samples: Any) -> list[int]:
    return [int(one["cls"]) for one in samples]


def test_samples_come_in_order_by_key_and_extension(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", 3)
    assert list(TarSamples([url])) == [
        {"__key__": f"dog/{number:04}", "__url__": url, "txt": b"x" * number, "cls": str(number).encode()}
        for number in range(3)
    ]


def test_the_same_samples_make_the_same_bytes(tmp_path: Path) -> None:
    first, second = (Path(write(tmp_path / name)).read_bytes() for name in ("a.tar", "b.tar"))
    assert first == second


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_other_writers_are_read(tmp_path: Path, form: int) -> None:
    """WebDataset's writer gives every file a time with a fraction, which takes a header of its own."""
    long = "f" * 60 + "/" + "é" * 60 + "/" if form != tarfile.USTAR_FORMAT else "folder/"
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w|", format=form) as archive:
        for name, data in [("7.seg.PNG", b"1" * 512), ("7.cls", b""), ("8.cls", b"3"), ("README", b"no sample")]:
            member = tarfile.TarInfo(long + name)
            member.size, member.mtime = len(data), 12.25
            archive.addfile(member, io.BytesIO(data))
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    first, second = TarSamples([path])
    assert first == {"__key__": f"{long}7", "__url__": str(path), "seg.png": b"1" * 512, "cls": b""}
    assert second["cls"] == b"3"


def test_a_pipe_and_a_compressed_archive_are_read(tmp_path: Path) -> None:
    plain = Path(write(tmp_path / "a.tar", 5)).read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain))
    with pytest.raises(PacelineError, match=r"a\.tar\.gz, at byte 0: .* compressed archive; give opener=gzip\.open"):
        list(TarSamples([tmp_path / "a.tar.gz"]))
    assert classes(TarSamples([tmp_path / "a.tar.gz"], opener=gzip.open)) == list(range(5))  # type: ignore[arg-type]

    def pipe(url: str) -> BinaryIO:
        reading, writing = os.pipe()
        os.write(writing, plain)  # 10,240 bytes: less than a pipe holds
        os.close(writing)
        return open(reading, "rb")

    assert classes(TarSamples(["pipe:"], opener=pipe)) == list(range(5))


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    """Also one between two files, which tarfile takes for the end."""
    whole = Path(write(tmp_path / "whole.tar", 3)).read_bytes()
    end = Path(tmp_path / "whole.tar").read_bytes().rstrip(b"\0")
    last = -(-len(end) // 512) * 512
    cut = tmp_path / "cut.tar"
    for length in range(0, last + 512, 256):
        cut.write_bytes(whole[:length])
        with pytest.raises(PacelineError, match=rf"cut\.tar, at byte {length // 512 * 512 if length else 0}|cut off"):
            list(TarSamples([cut]))
    cut.write_bytes(whole[: last + 512])
    assert classes(TarSamples([cut])) == [0, 1, 2]


def test_damage_names_the_file_and_the_place(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tar", 3))
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        offset = archive.getmembers()[3].offset
    data[offset + 3] ^= 1
    path.write_bytes(data)
    found = TarSamples([path])
    samples = iter(found)
    assert int(next(samples)["cls"]) == 0
    with pytest.raises(PacelineError, match=rf"a\.tar, at byte {offset}: the archive is damaged"):
        list(samples)
    with pytest.raises(PacelineError, match=r"nothing\.tar cannot be read: No such file"):
        list(TarSamples([tmp_path / "nothing.tar"]))
    (tmp_path / "text.tar").write_bytes(b"text" * 200)
    with pytest.raises(PacelineError, match=r"text\.tar, at byte 0: this is no tar archive"):
        list(TarSamples([tmp_path / "text.tar"]))


@pytest.mark.parametrize("records", [b"99 path=a\n", b"x", b"11 size=-1\n", b"0 a=b\n"])
def test_a_damaged_extended_header_is_named(tmp_path: Path, records: bytes) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        header = tarfile.TarInfo("x")
        header.type, header.size = tarfile.XHDTYPE, len(records)
        archive.addfile(header, io.BytesIO(records))
        archive.addfile(tarfile.TarInfo("1.cls"))
    with pytest.raises(PacelineError, match=r"a\.tar, at byte 0: the extended header"):
        list(TarSamples([path]))


@pytest.mark.parametrize("size", [b"-0000000512\0", b"\x80" + b"\xff" * 11, b"\x80\0\0\0\0\0\0\x01\0\0\0\x01"])
def test_a_size_that_no_file_has_takes_no_memory(tmp_path: Path, size: bytes) -> None:
    """The header's checksum is right: somebody has made it so."""
    block = bytearray(tarfile.TarInfo("1.cls").tobuf())
    block[124:136] = size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(block) + bytes(1024))
    with pytest.raises(PacelineError, match=r"a\.tar, at byte 0: 1\.cls has -?\d+ bytes; at most 4294967296"):
        list(TarSamples([path]))


def test_files_that_belong_to_no_single_sample_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("7.cls", "7.CLS"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(PacelineError, match="at byte 512: sample 7 has a second file cls"):
        list(TarSamples([path]))
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("7.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "8.jpg"
        archive.addfile(link)
    with pytest.raises(PacelineError, match=r"at byte 0: 7\.jpg is a link"):
        list(TarSamples([path]))


@pytest.mark.parametrize(
    ("key", "files"),
    [
        ("a.b", {"cls": b""}),
        ("a", {"CLS": b""}),
        ("a", {"b/c": b""}),
        ("__a", {"cls": b""}),
        ("a", {}),
        ("", {"c": b""}),
    ],
)
def test_samples_that_would_not_come_back_are_not_written(tmp_path: Path, key: str, files: dict[str, bytes]) -> None:
    with TarWriter(tmp_path / "a.tar") as file, pytest.raises(ValueError, match=r"does not read as|has no files"):
        file.write(key, files)


def test_a_key_that_comes_twice_in_a_row_is_not_written(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as file:
        file.write("a", {"cls": b""})
        with pytest.raises(ValueError, match="the key of the sample before"):
            file.write("a", {"txt": b""})


def test_one_string_is_no_list() -> None:
    with pytest.raises(TypeError, match="give a list"):
        TarSamples("train.tar")


def test_files_are_decoded_by_their_extension() -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (3, 2), 7).save(file, "PNG")
    sample = {"__key__": "1", "png": file.getvalue(), "cls": b"3", "json": b'{"a": 1}', "txt": b"\xc3\xa9", "bin": b"x"}
    found = decoded(sample)
    assert torch.equal(found.pop("png"), torch.full((3, 2, 3), 7, dtype=torch.uint8))
    assert found == {"__key__": "1", "cls": 3, "json": {"a": 1}, "txt": "é", "bin": b"x"}


@pytest.mark.parametrize("archives", [1, 2, 3])
def test_processes_of_a_loader_share_the_samples(tmp_path: Path, archives: int) -> None:
    """Two processes read archives of their own, or every second sample of one."""
    urls = [write(tmp_path / f"{number}.tar", 5, 5 * number) for number in range(archives)]
    found = list(DataLoader(TarSamples(urls, _class), batch_size=None, num_workers=2))
    assert sorted(number for number, _ in found) == list(range(5 * archives))
    assert len({process for _, process in found}) == 2


def _class(sample: dict[str, bytes]) -> tuple[int, int]:
    return int(sample["cls"]), os.getpid()


def test_memory_stays_flat_over_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with TarWriter(path) as file:
        for number in range(400):
            file.write(str(number), {"bin": bytes(20_000)})
    samples = iter(TarSamples([path]))
    next(samples)
    tracemalloc.start()
    try:
        for number, _ in enumerate(samples):
            if number == 20:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < before + 50_000
    assert peak < before + 200_000, "a few samples of 20,000 bytes, of 8 MB"


def test_places_of_files_are_found_without_their_bytes(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tar", 3))
    whole = path.read_bytes()
    with open(path, "rb") as file:
        places = list(grouped(Archive(file, str(path), places=True)))
    for found, sample in zip(places, TarSamples([path]), strict=True):
        for name in ("txt", "cls"):
            offset, size = found[name]
            assert whole[offset : offset + size] == sample[name]
    path.write_bytes(whole[:-10_000])
    with open(path, "rb") as file, pytest.raises(PacelineError, match="cut off"):
        list(Archive(file, str(path), places=True))
