"""Files in MXNet's RecordIO format."""

import os
import pickle
import struct
import tracemalloc
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.data import ShardedSampler
from paceline.data.record_files import ImageHeader, Records, RecordWriter, pack, unpack
from paceline.errors import PacelineError

MAGIC = struct.pack("<I", 0xCED7230A)


def write(path: Path, records: list[bytes]) -> Path:
    with RecordWriter(path) as file:
        for record in records:
            file.write(record)
    return path


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"hello", b"", b"12" + MAGIC + b"3456", b"1234" + MAGIC + b"56"])
    expected = MAGIC + struct.pack("<I", 5) + b"hello\0\0\0"
    expected += MAGIC + struct.pack("<I", 0)
    expected += MAGIC + struct.pack("<I", 10) + b"12" + MAGIC + b"3456" + b"\0\0"  # not at a multiple of four
    expected += MAGIC + struct.pack("<I", 1 << 29 | 4) + b"1234"  # the magic number is left out and the record cut
    expected += MAGIC + struct.pack("<I", 3 << 29 | 2) + b"56\0\0"
    assert path.read_bytes() == expected
    assert (tmp_path / "a.idx").read_text() == "0\t0\n1\t16\n2\t24\n3\t44\n"


pieces = st.lists(st.one_of(st.binary(max_size=9), st.just(MAGIC)), max_size=6).map(b"".join)


@settings(deadline=None)
@given(records=st.lists(pieces, max_size=8))
def test_records_come_back_with_and_without_the_index(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
) -> None:
    path = write(tmp_path_factory.mktemp("records") / "a.rec", records)
    found = Records(path)
    assert [found[position] for position in range(len(found))] == records
    path.with_suffix(".idx").unlink()
    scanned = Records(path)
    assert [scanned[position] for position in range(len(scanned))] == records


@pytest.mark.parametrize("labels", [(3.0,), (1.0, 0.5, 7.0), ()])
def test_image_records_hold_labels_and_image(labels: tuple[float, ...]) -> None:
    header = ImageHeader(labels or (0.0,), 7, 8)
    assert unpack(pack(header, b"image")) == (header, b"image")


def test_labels_are_read_without_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = [ImageHeader((3.0,), 1), ImageHeader((5.0, 0.5), 2), ImageHeader((7.0,), 0xCED7230A), ImageHeader((9.0,))]
    images = [bytes(10_000), bytes(10_000), bytes(100), b""]
    records = Records(write(tmp_path / "a.rec", [pack(*one) for one in zip(headers, images, strict=True)]))
    sizes, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: sizes.append(size) or pread(file, size, offset))
    assert [records.label(position) for position in range(4)] == [3.0, 5.0, 7.0, 9.0]
    assert sum(sizes) < 1000


def test_header_of_one_label_is_mxnets() -> None:
    assert pack(ImageHeader((2.5,), 7), b"x") == struct.pack("<IfQQ", 0, 2.5, 7, 0) + b"x"


@pytest.mark.parametrize("record", [b"short", struct.pack("<IfQQ", 5, 0, 0, 0) + b"1234"])
def test_a_record_without_room_for_its_header_is_refused(record: bytes) -> None:
    with pytest.raises(PacelineError, match="is no image record"):
        unpack(record)


def test_a_loader_reads_in_processes_of_its_own(tmp_path: Path) -> None:
    records = [bytes([number]) * (number + 1) for number in range(50)]
    data = Records(write(tmp_path / "a.rec", records))
    assert data[3] == records[3]  # the parent has the file open
    for context, processes in (("fork", 2), ("spawn", 1)):  # a spawned one imports torch
        how = get_context(context)
        loader = DataLoader(data, batch_size=None, num_workers=processes, multiprocessing_context=how)
        assert list(loader) == records
    assert pickle.loads(pickle.dumps(data))[4] == records[4]


def test_damage_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"hello", b"world"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(PacelineError, match="cut off"):
        Records(path)[1]
    path.write_bytes(b"\0" + whole[1:])
    with pytest.raises(PacelineError, match="damaged at byte 0"):
        Records(path)[0]
    path.with_suffix(".idx").write_text("0 1\n")
    with pytest.raises(PacelineError, match="no index"):
        Records(path)
    with pytest.raises(PacelineError, match=r"nothing\.rec cannot be read"):
        Records(tmp_path / "nothing.rec")


@pytest.mark.parametrize(
    "index", [b"0\t1\t2\n" * 2, b"0\t" + b"9" * 20 + b"\n", b"0\t\n", b"0\n1\n", b"a\t0\n", b"\xff\xfe", b"\0"]
)
def test_damaged_index_is_named(tmp_path: Path, index: bytes) -> None:
    path = write(tmp_path / "a.rec", [b"hello"])
    path.with_suffix(".idx").write_bytes(index)
    with pytest.raises(PacelineError, match=r"a\.idx is no index"):
        Records(path)


def test_empty_index_has_no_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"hello"])
    path.with_suffix(".idx").write_text("\n")
    assert len(Records(path)) == len(Records(path).keys) == 0


def test_part_of_a_record_is_no_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"1234" + MAGIC + b"5678", b"second"])
    (tmp_path / "a.idx").write_text("0\t12\n1\t-4\n")
    records = Records(path)
    with pytest.raises(PacelineError, match=r"a.rec is damaged at byte 12: a part of a record stands alone"):
        records[0]
    with pytest.raises(PacelineError, match=r"byte -4"):
        records[1]
    whole = bytearray(path.read_bytes())
    whole[12 + 7] = 0  # the last part says that it is a record
    path.write_bytes(whole)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(PacelineError, match=r"damaged at byte 12"):
        Records(path)[0]


def test_a_record_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as file, pytest.raises(ValueError, match="at most 536870911 bytes"):
        file.write(bytes(1 << 29))


@pytest.mark.parametrize("processes", [0, 2])
def test_every_record_is_read_once_with_unequal_shares(tmp_path: Path, processes: int) -> None:
    numbers = [str(number).encode() for number in range(33)]
    data = Records(write(tmp_path / "a.rec", numbers))
    for epoch in range(2):
        seen = []
        for span in ((0.0, 0.2), (0.2, 1.0)):
            sampler = ShardedSampler(data, span=span, even=False, seed=1)
            sampler.set_epoch(epoch)
            seen.append(list(DataLoader(data, batch_size=None, sampler=sampler, num_workers=processes)))
        assert len(seen[0]) < len(seen[1]) / 3
        assert sorted(seen[0] + seen[1]) == sorted(numbers)


def test_memory_stays_flat_over_an_epoch(tmp_path: Path) -> None:
    data = Records(write(tmp_path / "a.rec", [bytes(20_000)] * 400))
    data[0]
    tracemalloc.start()
    try:
        for position in range(len(data)):
            data[position]
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < 5_000
    assert peak < 100_000, "a few records of 20,000 bytes, of 8 MB"
