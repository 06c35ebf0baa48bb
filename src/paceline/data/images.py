"""What data sets of images in files share."""

from __future__ import annotations

import abc
import os

import torch

from paceline.data.dataset import ArrayDataset
from paceline.data.files import Bytes
from paceline.data.partition import check_part, part_bounds


class ImageDataset(ArrayDataset, abc.ABC):
    """Images [N, channels, height, width] float32 in 0 to 1, and labels [N] int64.

    Args:
        data_dir: where the files are.
        train: the training samples rather than the test samples.
        num_parts: keep only one of so many contiguous parts, whose sizes differ by at most one.
        part_index: which part.

    Raises:
        DataError: a file is missing or damaged.
        ValueError: there is no such part.
    """

    def __init__(
        self, data_dir: str | os.PathLike[str], train: bool = True, num_parts: int = 1, part_index: int = 0
    ) -> None:
        check_part(num_parts, part_index)
        pixels, labels = self._read(data_dir, train)
        part = slice(*part_bounds(len(labels), num_parts, part_index))
        images = torch.tensor(pixels[part]).to(torch.float32).div_(255)
        super().__init__(images, torch.tensor(labels[part]).to(torch.int64))

    @abc.abstractmethod
    def _read(self, data_dir: str | os.PathLike[str], train: bool) -> tuple[Bytes, Bytes]:
        """Return all pixels, [N, channels, height, width], and all labels, [N]; raises DataError."""
