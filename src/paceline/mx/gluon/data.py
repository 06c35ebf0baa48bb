"""Gluon's names for data: torch's data sets, samplers and loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data import Dataset, Sampler, sampler

from paceline.data.dataset import ArrayDataset
from paceline.naming import absent

__all__ = ["ArrayDataset", "DataLoader", "Dataset", "Sampler", "sampler"]


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's loader, with MXNet's ``last_batch``.

    Args:
        dataset: the samples.
        batch_size: samples per batch.
        shuffle: a new order every epoch.
        sampler: the order, in place of ``shuffle``.
        last_batch: ``keep`` or ``discard`` a last batch that is smaller.
        **options: options of torch's loader.

    Raises:
        ValueError: another ``last_batch``, or neither ``batch_size`` nor ``batch_sampler``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Any = None,
        last_batch: str = "keep",
        **options: Any,
    ) -> None:
        if last_batch not in ("keep", "discard"):
            raise ValueError(
                f"last_batch {last_batch!r} is not possible: 'keep' or 'discard'. "
                "paceline.data.ShardedSampler cuts epochs into whole batches"
            )
        if batch_size is None and "batch_sampler" not in options:
            raise ValueError("batch_size is missing: give it, or a batch_sampler")
        if "batch_sampler" not in options:
            options |= {"batch_size": batch_size, "drop_last": last_batch == "discard"}
        super().__init__(dataset, shuffle=shuffle or None, sampler=sampler, **options)


if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _INSTEAD = {
        "BatchSampler": "torch.utils.data.BatchSampler, whose third argument is drop_last",
        "RandomSampler": "DataLoader(shuffle=True), or paceline.data.ShardedSampler",
        "RecordFileDataset": "paceline.data.Records",
        "SequentialSampler": "torch.utils.data.SequentialSampler, whose argument is the data set",
        "SimpleDataset": "a list",
        "vision": "torchvision.datasets and its transforms, or paceline.data.digits",
    }
    __getattr__ = absent(__name__, __all__, _INSTEAD)
