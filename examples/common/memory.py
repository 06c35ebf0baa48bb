"""Images in memory, those of MNIST and CIFAR: a worker's part of every batch; CIFAR's are cropped and mirrored."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from readers import DataError, ImageDataset
from torch.nn import functional as F

import paceline
from common import fit, flags
from paceline.kvstore import KVStoreBase

#: Mean and standard deviation of CIFAR-10's channels.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def train_cifar(
    doc: str | None, kind: type[ImageDataset], words: Sequence[str] | None, **defaults: object
) -> fit.Training | None:
    """Train as the command line says on CIFAR-10 or CIFAR-100.

    Args:
        doc: the script's documentation, for ``--help``.
        kind: the reader of the data set.
        words: the command line, without the script's name; None: that of this process.
        defaults: of flags.
    """
    name = kind.__name__.lower()
    args = flags.parse(flags.parser(doc, lr_step_epochs="200,250", data_dir=name, **defaults), words)

    def read(store: KVStoreBase) -> InMemory:
        try:
            return InMemory(args, store, partial(kind, args.data_dir), is_cifar=True)
        except DataError as error:
            raise SystemExit(
                f"{error}; or name another folder with --data-dir; examples/make_data.py {name} FOLDER makes small "
                "files"
            ) from error

    return fit.run(args, (3, 32, 32), read)


class InMemory:
    """Training and test batches of one worker.

    Args:
        args: of the command line.
        store: the store of the job.
        read: the reader, called with ``train=True`` and ``train=False``.
        is_cifar: scale the images to mean 0 and deviation 1; crop and mirror those for training at random.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        store: KVStoreBase,
        read: Callable[..., paceline.data.ArrayDataset],
        is_cifar: bool = False,
    ) -> None:
        if args.data_nthreads is not None:
            raise SystemExit(
                "--data-nthreads: these images are in memory, and nothing decodes them; leave the flag out"
            )
        train, self._test = read(train=True), read(train=False)
        images, labels = (one[: args.num_examples] for one in train.tensors)
        self.num_classes, self._is_cifar, self._seed = args.num_classes, is_cifar, args.seed
        self._sampler = fit.own_part(args, len(labels), store)
        # The number of a sample decides how it is cropped.
        numbered = paceline.data.ArrayDataset(images, labels, torch.arange(len(labels)))
        self._loader = paceline.data.batches(numbered, self._sampler)
        self._count = len(labels)

    def __len__(self) -> int:
        return len(self._loader)

    def train(self, epoch: int) -> Iterable[fit.Batch]:
        self._sampler.set_epoch(epoch)
        crops = random_crops(self._count, self._seed, epoch) if self._is_cifar else None
        for images, labels, numbers in self._loader:
            yield images if crops is None else normalised(cropped_and_mirrored(images, crops[numbers])), labels

    def test(self) -> Iterable[fit.Batch]:
        for images, labels in paceline.data.batches(self._test, batch_size=500):
            yield normalised(images) if self._is_cifar else images, labels


def random_crops(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return how the samples of an epoch are cropped: first row (0 to 8), first column, and whether mirrored.

    They depend on seed and epoch alone: a sample is cropped alike whichever worker trains on it, and after a resume.
    """
    chance = np.random.default_rng([seed, epoch])
    return torch.from_numpy(chance.integers([9, 9, 2], size=(count, 3)))


def cropped_and_mirrored(images: torch.Tensor, crops: torch.Tensor) -> torch.Tensor:
    """Return images [N, C, H, W], cropped by ``crops`` [N, 3] with 4 pixels of zeros around; some are mirrored."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    rows, columns = crops[:, :1] + torch.arange(height), crops[:, 1:2] + torch.arange(width)
    columns = torch.where(crops[:, 2:] == 1, columns.flip(1), columns)
    which = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Return images with mean 0 and deviation 1 in each channel."""
    return (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
