"""The handwritten digits that scikit-learn carries: a real data set that needs no download."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.data.dataset import ArrayDataset
from paceline.data.partition import check_part
from paceline.errors import DataError

_TEST_EVERY = 5


def digits(train: bool = True, num_parts: int = 1, part_index: int = 0) -> ArrayDataset:
    """Return the 1,797 digits of the UCI ML repository in MNIST's shape.

    The 8x8 images are scaled bilinearly to 28x28. The split is the same everywhere: every fifth sample of each class
    is a test sample (360), the others (1,437) are for training.

    Args:
        train: training rather than test samples.
        num_parts: only one of so many contiguous parts, whose sizes differ by at most one.
        part_index: which part.

    Returns:
        Images [N, 1, 28, 28] float32 in 0 to 1 and labels [N] int64.

    Raises:
        DataError: scikit-learn is not installed.
        ValueError: there is no such part.
    """
    check_part(num_parts, part_index)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits data set comes with scikit-learn: pip install 'paceline[examples]'") from error
    data = load_digits()
    labels = torch.from_numpy(data.target).to(torch.int64)
    images = torch.from_numpy(data.images).to(torch.float32).div_(16).unsqueeze(1)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[labels.argsort(stable=True)[::_TEST_EVERY]] = True
    if train:
        chosen = ~chosen
    scaled = F.interpolate(images[chosen], size=(28, 28), mode="bilinear", align_corners=False)
    return ArrayDataset(scaled, labels[chosen]).shard(num_parts, part_index)
