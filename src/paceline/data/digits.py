"""The handwritten digits of the UCI repository: a real data set that comes with paceline."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from paceline.data.dataset import ArrayDataset

Pixels = NDArray[np.uint8]

_FILE = Path(__file__).with_name("digits.gz")
_TEST_EVERY = 5


def digits(train: bool = True, num_parts: int = 1, part_index: int = 0) -> ArrayDataset:
    """Return 1,797 digits of the UCI repository in MNIST's shape (Alpaydin and Kaynak 1998, 10.24432/C50P49).

    The 8x8 images are scaled bilinearly to 28x28. The split is the same everywhere: every fifth sample of each class
    is a test sample (360), the others (1,437) are for training.

    Args:
        train: training rather than test samples.
        num_parts: only one of so many contiguous parts, whose sizes differ by at most one.
        part_index: which part.

    Returns:
        Images [N, 1, 28, 28] float32 in 0 to 1 and labels [N] int64.

    Raises:
        ValueError: there is no such part.
    """
    pixels, classes = read_digits()
    labels = torch.tensor(classes, dtype=torch.int64, device="cpu")
    images = torch.tensor(pixels, dtype=torch.float32, device="cpu").div_(16).unsqueeze(1)
    chosen = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    chosen[labels.argsort(stable=True)[::_TEST_EVERY]] = True
    if train:
        chosen = ~chosen
    scaled = F.interpolate(images[chosen], size=(28, 28), mode="bilinear", align_corners=False)
    return ArrayDataset(scaled, labels[chosen]).shard(num_parts, part_index)


def read_digits() -> tuple[Pixels, Pixels]:
    """Return all images [1797, 8, 8] with pixels 0 to 16, and their classes [1797], in the order of scikit-learn."""
    rows = np.frombuffer(gzip.decompress(_FILE.read_bytes()), dtype=np.uint8).reshape(-1, 1 + 64)
    return rows[:, 1:].reshape(-1, 8, 8), rows[:, 0]
