"""Samples per second of images that are read from folders and RecordIO, with one decoder for all.

    python -m benchmarks.readers --images 1000 --size 256 --processes 2

The images are made up: smooth noise, as JPEG. Both are read in a random order. They lie
in the page cache, so the time is that of opening, reading and decoding. The rounds of the two alternate, as other
programs may use the machine; figures are medians, and *x folders* is a ratio of medians. *Reading* and *decoding* are
processor times: of reading alone in one process, and of the whole loader with all its processes. The *speed* is by the
clock, so it counts on a quiet machine only. *Memory* is the most that Python's objects take at once in an epoch of
reading. The last line of the output is the table as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import resource
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline.data import Records, RecordWriter
from paceline.data.ledger import epoch_order
from paceline.data.record_files import ImageHeader, pack, unpack

BATCH = 32


@dataclass(frozen=True)
class Result:
    reader: str
    reading_us: float
    """Processor time per sample, without decoding."""
    decoding_us: float
    """Processor time per sample of a loader, read, decoded and stacked to batches."""
    decoded_per_s: float
    """Samples per second of that loader."""
    cpu_against_folders: float
    speed_against_folders: float
    memory_kib: float


def decode(image: bytes, label: int) -> tuple[torch.Tensor, int]:
    """Return an image of 3 x 224 x 224 and its class."""
    with Image.open(io.BytesIO(image)) as file:
        pixels = np.array(file.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), label


def keep(image: bytes, label: int) -> int:
    """Return the size of an image."""
    return len(image)


class Folders(Dataset[Any]):
    """The images of a folder per class."""

    def __init__(self, folder: Path, use: Any) -> None:
        self._paths, self._use = sorted(folder.glob("*/*.jpg")), use

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        path = self._paths[index]
        return self._use(path.read_bytes(), int(path.parent.name))


class RecordImages(Dataset[Any]):
    """The images of a RecordIO file."""

    def __init__(self, folder: Path, use: Any) -> None:
        self._records, self._use = Records(folder / "train.rec"), use

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        header, image = unpack(self._records[index])
        return self._use(image, int(header.labels[0]))


READERS = {"folders": Folders, "RecordIO": RecordImages}


def write(folder: Path, images: int, size: int) -> int:
    """Write the images in both forms; returns the bytes of the images."""
    chance, total = torch.Generator().manual_seed(0), 0
    with RecordWriter(folder / "train.rec") as records:
        for number in range(images):
            noise = torch.rand((1, 3, size // 8, size // 8), generator=chance)
            pixels = F.interpolate(noise, (size, size), mode="bilinear")[0].permute(1, 2, 0)
            file = io.BytesIO()
            Image.fromarray((pixels * 255).byte().numpy()).save(file, "JPEG", quality=90)
            image, label = file.getvalue(), number % 10
            path = folder / str(label) / f"{number:06}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(image)
            records.write(pack(ImageHeader((float(label),), number), image))
            total += len(image)
    return total


def reading_s(data: Any, epoch: int) -> float:
    """Return the processor time of reading all images in this process."""
    indices = epoch_order(len(data), 0, epoch).tolist()
    begun = time.process_time()
    for _ in map(data.__getitem__, indices):
        pass
    return time.process_time() - begun


def memory_kib(data: Any) -> float:
    """Return the most memory that reading all images has taken at once, beyond what was there before."""
    indices = epoch_order(len(data), 0, 0).tolist()
    tracemalloc.start()
    try:
        for _ in map(data.__getitem__, indices):
            pass
        return tracemalloc.get_traced_memory()[1] / 1024
    finally:
        tracemalloc.stop()


def decoding_s(data: Any, epoch: int, processes: int) -> tuple[float, float]:
    """Return the processor time of a loader, and the time from the first batch to the last: processes start slowly."""
    loader = DataLoader(data, BATCH, sampler=epoch_order(len(data), 0, epoch).tolist(), num_workers=processes)
    before_s, batches = processor_s(), iter(loader)
    next(batches)
    begun = time.perf_counter()
    for _ in batches:
        pass
    elapsed_s = time.perf_counter() - begun
    del batches  # its processes end, and count as children
    return processor_s() - before_s, elapsed_s


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(folder: Path, images: int, processes: int, rounds: int) -> list[Result]:
    """Measure all readers, round after round."""
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in READERS}
    for epoch in range(rounds + 1):
        for name, reader in READERS.items():
            times = reading_s(reader(folder, keep), epoch), *decoding_s(reader(folder, decode), epoch, processes)
            if epoch:  # the first round fills the page cache
                seconds[name].append(times)
    usual = {name: [statistics.median(column) for column in zip(*one, strict=True)] for name, one in seconds.items()}
    _, base_cpu_s, base_s = usual["folders"]
    return [
        Result(
            name,
            read_s / images * 1e6,
            cpu_s / images * 1e6,
            (images - BATCH) / elapsed_s,
            base_cpu_s / cpu_s,
            base_s / elapsed_s,
            memory_kib(READERS[name](folder, keep)),
        )
        for name, (read_s, cpu_s, elapsed_s) in usual.items()
    ]


#: Headings of the table, and how the fields of a result are written.
COLUMNS = {
    "reader": "",
    "reading, us": ".1f",
    "decoding, us": ".0f",
    "images/s": ",.0f",
    "x folders (processor)": ".3f",
    "x folders (speed)": ".2f",
    "memory, KiB": ".0f",
}


def table_of(results: Sequence[Result], title: str) -> Table:
    table = Table(title=title)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "reader" else "right")
    for one in results:
        table.add_row(*map(format, astuple(one), COLUMNS.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="number of images (1000)")
    parser.add_argument("--size", type=int, default=256, help="height and width of an image in pixels (256)")
    parser.add_argument("--processes", type=int, default=2, help="of the loader (2)")
    parser.add_argument("--rounds", type=int, default=5, help="whose medians count (5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        size_bytes = write(Path(name), options.images, options.size)
        results = measure(Path(name), options.images, options.processes, options.rounds)
    kib = size_bytes / options.images / 1024
    Console(width=110).print(
        table_of(results, f"{options.images} images of {kib:.0f} KiB, {options.processes} processes")
    )
    facts = {"images": options.images, "kib": round(kib, 1), "processes": options.processes}
    facts |= {"machine": platform.machine(), "torch": torch.__version__}
    print(json.dumps(facts | {"results": [asdict(one) for one in results]}))


if __name__ == "__main__":
    main()
