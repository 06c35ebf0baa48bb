"""Images in folders, one per class, as ImageNet is usually stored: ``train/<class>/<image>``, and ``val/`` like it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import paceline
from common.fit import Batch
from paceline.kvstore import KVStoreBase

#: Mean and standard deviation of ImageNet's channels.
MEAN, DEVIATION = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """Images of a folder, decoded when they are asked for: [3, size, size] float32 with mean 0, and a class.

    Args:
        folder: holds a folder per class.
        size: height and width in pixels.
        augment: crop at random (8 to 100 % of the area, Szegedy et al. 2014) and mirror; otherwise the middle is taken.
    """

    def __init__(self, folder: Path, size: int, augment: bool) -> None:
        self.size, self.augment = size, augment
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        self.samples = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in _SUFFIXES
        ]
        if not self.samples:
            raise SystemExit(
                f"{folder} holds no folders with images; extract ImageNet there, one folder per class, or make a small "
                f"data set: python examples/make_data.py imagenet {folder.parent}"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        path, label = self.samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = self._random_box(image.size) if self.augment else self._middle(image.size)
        pixels = np.array(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box))
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        scaled = torch.from_numpy(np.ascontiguousarray(pixels)).float().div_(255)
        return ((scaled - MEAN) / DEVIATION).permute(2, 0, 1).contiguous(), label

    def _random_box(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        width, height = size
        for _ in range(10):
            area = width * height * float(torch.empty(()).uniform_(0.08, 1.0))
            ratio = float(torch.empty(()).uniform_(np.log(3 / 4), np.log(4 / 3)).exp())
            w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
            if w <= width and h <= height:
                left, top = float(torch.rand(())) * (width - w), float(torch.rand(())) * (height - h)
                return left, top, left + w, top + h
        return self._middle(size)

    @staticmethod
    def _middle(size: tuple[int, int]) -> tuple[float, float, float, float]:
        side = min(size) * 0.875  # 224 of 256 pixels
        left, top = (size[0] - side) / 2, (size[1] - side) / 2
        return left, top, left + side, top + side


class Folders:
    """Training and test batches of one worker, decoded in processes of their own."""

    def __init__(self, args: argparse.Namespace, store: KVStoreBase, size: int) -> None:
        if not args.data_dir:
            raise SystemExit("--data-dir: a folder with train/ and val/; examples/make_data.py makes small ones")
        train = ImageFolder(Path(args.data_dir) / "train", size, augment=True)
        self.num_classes = len(train.classes)
        count = min(args.num_examples or len(train), len(train))
        self._sampler = self._part(args, count, store)
        options: dict[str, Any] = {"num_workers": args.data_nthreads, "persistent_workers": args.data_nthreads > 0}
        size_here = self._sampler.batch_size or args.batch_size
        self._train = DataLoader(train, size_here, sampler=self._sampler, drop_last=True, **options)
        self._test = DataLoader(
            ImageFolder(Path(args.data_dir) / "val", size, augment=False), 100, num_workers=args.data_nthreads
        )

    @staticmethod
    def _part(args: argparse.Namespace, count: int, store: KVStoreBase) -> paceline.data.ShardedSampler:
        if not args.data_allocator:
            return paceline.data.ShardedSampler(count, store.num_workers, store.rank, seed=args.seed)
        span = paceline.data.read_spans("data_sharding", store.num_workers)[store.rank]
        together = args.batch_size * store.num_workers
        return paceline.data.ShardedSampler(count, span=span, global_batch_size=together, seed=args.seed)

    def __len__(self) -> int:
        return len(self._train)

    def train(self, epoch: int) -> Iterable[Batch]:
        self._sampler.set_epoch(epoch)
        return self._train

    def test(self) -> Iterable[Batch]:
        return self._test
