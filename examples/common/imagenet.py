"""ImageNet, as it is usually stored: a folder per class in ``train/`` and ``val/``, RecordIO files, or tar archives."""

from __future__ import annotations

import argparse
import io
import math
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import paceline
from common.fit import Batch, own_part
from paceline.data.record_files import unpack
from paceline.kvstore import KVStoreBase

#: Mean and standard deviation of ImageNet's channels.
MEAN, DEVIATION = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images that are decoded when they are asked for: [3, size, size] float32 with mean 0, and a class.

    Args:
        source: what opens an image by its position: a file or its bytes, and its class.
        size: height and width in pixels.
        augment: crop at random (8 to 100 % of the area, Szegedy et al. 2014) and mirror; otherwise the middle is taken.
    """

    def __init__(self, source: FolderSource | RecordSource | TarSource, size: int, augment: bool) -> None:
        self.source, self.size, self.augment = source, size, augment

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        where, label = self.source.open(index)
        with Image.open(where) as file:
            image = file.convert("RGB")
        box = random_box(image.size) if self.augment else middle_box(image.size)
        pixels = np.array(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box))
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        scaled = torch.from_numpy(np.ascontiguousarray(pixels)).float().div_(255)
        return ((scaled - MEAN) / DEVIATION).permute(2, 0, 1).contiguous(), label


class FolderSource:
    """The images of a folder that holds a folder per class."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.num_classes = len(classes)
        self._samples = [
            (path, number)
            for number, name in enumerate(classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in _SUFFIXES
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def open(self, index: int) -> tuple[Path, int]:
        return self._samples[index]


class RecordSource:
    """The images of a RecordIO file, as MXNet's ``im2rec`` writes it."""

    def __init__(self, path: Path) -> None:
        self._records = paceline.data.Records(path)
        self.num_classes = 1 + max(int(self._records.label(index)) for index in range(len(self._records)))

    def __len__(self) -> int:
        return len(self._records)

    def open(self, index: int) -> tuple[io.BytesIO, int]:
        header, image = unpack(self._records[index])
        return io.BytesIO(image), int(header.labels[0])


class TarSource:
    """The images of tar archives in WebDataset's form, with their classes in ``.cls``; only the headers are read."""

    def __init__(self, paths: list[Path]) -> None:
        self._samples: list[tuple[Path, int, int, int]] = []
        for path in paths:
            with tarfile.open(path, "r:") as archive:
                files = {member.name: member for member in archive}
                for name, member in files.items():
                    stem, suffix = os.path.splitext(name)
                    if suffix.lower() in _SUFFIXES:
                        label = archive.extractfile(files[f"{stem}.cls"]).read()
                        self._samples.append((path, member.offset_data, member.size, int(label)))
        self.num_classes = 1 + max(label for *_, label in self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def open(self, index: int) -> tuple[io.BytesIO, int]:
        path, offset, size, label = self._samples[index]
        with path.open("rb", buffering=0) as file:
            return io.BytesIO(os.pread(file.fileno(), size, offset)), label


def source(data_dir: str, part: str) -> FolderSource | RecordSource | TarSource:
    """Return the images of ``train`` or ``val``: of a record file, else of tar archives, else of folders."""
    folder = Path(data_dir)
    if (records := folder / f"{part}.rec").exists():
        return RecordSource(records)
    if archives := sorted(folder.glob(f"{part}*.tar")):
        return TarSource(archives)
    found = FolderSource(folder / part) if (folder / part).is_dir() else ()
    if not found:
        raise SystemExit(
            f"{folder} holds no {part}.rec, no {part}*.tar and no folders with images in {part}/: extract ImageNet "
            f"there, one folder per class, or make a small data set: python examples/make_data.py imagenet {folder}"
        )
    return found


def random_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return a part of an image of (width, height): left, top, right, bottom."""
    width, height = size
    for _ in range(10):
        area = width * height * float(torch.empty(()).uniform_(0.08, 1.0))
        ratio = float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3)).exp())
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = float(torch.rand(())) * (width - w), float(torch.rand(())) * (height - h)
            return left, top, left + w, top + h
    return middle_box(size)


def middle_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the middle of an image, 224 of 256 pixels."""
    side = min(size) * 0.875
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    return left, top, left + side, top + side


class ImageNet:
    """Training and test batches of one worker, decoded in processes of their own."""

    def __init__(self, args: argparse.Namespace, store: KVStoreBase, size: int) -> None:
        if not args.data_dir:
            raise SystemExit(
                "--data-dir: a folder with train/ and val/, train.rec or train*.tar; examples/make_data.py makes small "
                "ones"
            )
        found = source(args.data_dir, "train")
        self.num_classes = found.num_classes
        train = Images(found, size, augment=True)
        count = min(args.num_examples or len(train), len(train))
        self._sampler = own_part(args, count, store)
        processes = 2 if args.data_nthreads is None else args.data_nthreads
        options: dict[str, Any] = {"num_workers": processes, "persistent_workers": processes > 0}
        self._train = DataLoader(train, self._sampler.batch_size, sampler=self._sampler, **options)
        test = Images(source(args.data_dir, "val"), size, augment=False)
        self._test = DataLoader(test, 100, num_workers=processes)

    def __len__(self) -> int:
        return len(self._train)

    def train(self, epoch: int) -> Iterable[Batch]:
        self._sampler.set_epoch(epoch)
        return self._train

    def test(self) -> Iterable[Batch]:
        return self._test
