"""Batches straight from memory: one gather per tensor and batch, no Python work per sample."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler, TensorDataset

from paceline.data.fetching import Dealing
from paceline.data.sampler import ShardedSampler


class Batches:
    """An iterable of batches of a data set in memory, with a known length. Made by :func:`batches`."""

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], sampler: Sampler[int], batch_size: int, drop_last: bool
    ) -> None:
        self._tensors = tensors
        self._batch_size, self._drop_last = batch_size, drop_last
        self.sampler = sampler
        """Where the indices come from; its state is the loader's state."""

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        samples = len(self.sampler)  # type: ignore[arg-type]  # torch's Sampler leaves __len__ to its subclasses
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield one epoch: a tuple with a batch of every tensor of the data set."""
        with Dealing(self.sampler) as dealing:
            for indices in self._index_batches():
                dealing.deal(len(indices))
                yield tuple(tensor.index_select(0, indices) for tensor in self._tensors)

    def _index_batches(self) -> Iterator[torch.Tensor]:
        if isinstance(self.sampler, ShardedSampler):
            return self.sampler.index_batches(self._batch_size, self._drop_last)
        return map(torch.as_tensor, torch.utils.data.BatchSampler(self.sampler, self._batch_size, self._drop_last))


def batches(
    dataset: TensorDataset,
    sampler: Sampler[int] | None = None,
    batch_size: int | None = None,
    *,
    drop_last: bool = False,
) -> Batches:
    """Return a fast loader for tensors in memory. Iterating over it is one epoch of ``images, labels``.

    Args:
        dataset: an :class:`~paceline.data.ArrayDataset` or another data set with ``tensors``.
        sampler: which samples, usually a :class:`~paceline.data.ShardedSampler`; all of them in order by default.
        batch_size: samples in a batch of this worker; by default the sampler's own (``global_batch_size``).
        drop_last: leave out a last batch that is smaller.

    Raises:
        TypeError: the data set has no tensors; use torch's ``DataLoader`` for it.
        ValueError: no batch size, or another one than the sampler's.
    """
    if not hasattr(dataset, "tensors"):
        raise TypeError(
            f"a {type(dataset).__name__} does not lie in memory as tensors; use torch.utils.data.DataLoader"
        )
    sampler = ShardedSampler(dataset, shuffle=False) if sampler is None else sampler
    own = sampler.batch_size if isinstance(sampler, ShardedSampler) else None
    size = own if batch_size is None else batch_size
    if size is None or size < 1 or own not in (None, size):
        wanted = "at least 1" if own is None else f"the sampler's {own}"
        raise ValueError(f"batch_size is {batch_size}; it must be {wanted}")
    return Batches(dataset.tensors, sampler, size, drop_last)
