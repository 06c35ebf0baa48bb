"""CIFAR: its images in memory, cropped and mirrored at random, and the run of both scripts that train on them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
from models import build
from torch.nn import functional as F

import paceline
from common import fit, flags
from paceline.kvstore import KVStoreBase

#: Mean and standard deviation of CIFAR-10's channels.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def train(doc: str | None, read: Callable[..., paceline.data.ArrayDataset], network: str, num_classes: int) -> None:
    """Train as the command line says.

    Args:
        doc: the script's documentation, for ``--help``.
        read: the reader of the data set: ``CIFAR10`` or ``CIFAR100``.
        network: the network if no flag names one.
        num_classes: the number of classes if no flag names it.
    """
    args = flags.parser(doc, network=network, num_classes=num_classes, lr_step_epochs="200,250").parse_args()
    torch.manual_seed(args.seed)
    store = fit.open_store(args)
    data = Cifar(args, store, read)
    fit.fit(args, build(args.network, **flags.network_options(args, image_size=32)), data, store)


class Cifar:
    """Training and test batches of one worker."""

    def __init__(
        self, args: argparse.Namespace, store: KVStoreBase, read: Callable[..., paceline.data.ArrayDataset]
    ) -> None:
        if not args.data_dir:
            raise SystemExit("--data-dir: the folder with CIFAR's binary files; examples/make_data.py makes small ones")
        train, self._test = read(args.data_dir, train=True), read(args.data_dir, train=False)
        if args.num_examples:
            train = paceline.data.ArrayDataset(*(one[: args.num_examples] for one in train.tensors))
        self._sampler = fit.own_part(args, len(train), store)
        size = self._sampler.batch_size or args.batch_size
        self._loader = paceline.data.batches(train, self._sampler, size, drop_last=True)
        self._chance = torch.Generator().manual_seed(args.seed + store.rank)
        self._batch_size = args.batch_size

    def __len__(self) -> int:
        return len(self._loader)

    def train(self, epoch: int) -> Iterable[fit.Batch]:
        self._sampler.set_epoch(epoch)
        for images, labels in self._loader:
            yield normalised(cropped_and_mirrored(images, self._chance)), labels

    def test(self) -> Iterable[fit.Batch]:
        for images, labels in paceline.data.batches(self._test, batch_size=500):
            yield normalised(images), labels


def cropped_and_mirrored(images: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Return images [N, C, H, W], cropped at random with 4 pixels of zeros around; about half of them are mirrored."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    rows = torch.randint(9, (count, 1), generator=chance) + torch.arange(height)
    columns = torch.randint(9, (count, 1), generator=chance) + torch.arange(width)
    mirrored = torch.rand(count, 1, generator=chance) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Return images with mean 0 and deviation 1 in each channel."""
    return (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
