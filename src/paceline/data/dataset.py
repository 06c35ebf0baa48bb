"""Data in memory as tensors, and its batches: one gather per tensor and batch, no Python work per sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler, TensorDataset

from paceline.data.fetching import Dealing
from paceline.data.partition import shard_bounds
from paceline.data.sampler import ShardedSampler
from paceline.layout.tensors import as_tensor
from paceline.worker import alone


class ArrayDataset(TensorDataset):
    """Tensors of equal length, indexed together: one sample, a slice, or a whole batch at a time.

    ``dataset[index_tensor]`` returns a batch with one gather per tensor, with no Python work per sample.
    With a torch ``DataLoader`` it works as usual; give it ``sampler=BatchSampler(...), batch_size=None`` to fetch
    whole batches there too.
    """

    def __init__(self, *arrays: Any) -> None:
        """Keep tensors and NumPy's arrays without a copy; lists of numbers become tensors.

        Raises:
            ValueError: no data are given, or the first dimensions differ.
        """
        tensors = [as_tensor(one) for one in arrays]
        lengths = [tensor.shape[0] if tensor.ndim else None for tensor in tensors]
        if not tensors or None in lengths or len(set(lengths)) > 1:
            raise ValueError(
                f"the tensors of a data set have one sample per row, all the same number; got {lengths} rows"
            )
        super().__init__(*tensors)

    def __getitem__(self, index: int | slice | Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return one sample (int), or a batch (slice, list of ints or index tensor)."""
        if isinstance(index, torch.Tensor) and index.ndim:
            return tuple(tensor.index_select(0, index) for tensor in self.tensors)
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return samples as a list, the form that DataLoader's collate functions expect, from one gather."""
        batch = self[torch.as_tensor(indices, device=self.tensors[0].device)]
        return list(zip(*(tensor.unbind() for tensor in batch), strict=True))

    def shard(self, num_parts: int, part_index: int) -> ArrayDataset:
        """Return one of ``num_parts`` contiguous parts (views, not copies); the first ones get the remainder.

        Use :class:`paceline.data.ShardedSampler` instead where all workers must see equally many batches.

        Raises:
            ValueError: there is no such part.
        """
        start, stop = shard_bounds(len(self), num_parts, part_index)
        return ArrayDataset(*(tensor[start:stop] for tensor in self.tensors))


class _Epoch(Iterator[tuple[torch.Tensor, ...]]):
    """One walk of :class:`Batches`.

    Attributes:
        data: the tensors.
        sampler: where the indices come from.
        taken: batches that the loop has.
    """

    def __init__(
        self, data: tuple[torch.Tensor, ...], sampler: Sampler[int], index_batches: Iterator[torch.Tensor]
    ) -> None:
        self.data, self.sampler, self.taken = data, sampler, 0
        self._index_batches = index_batches

    def __next__(self) -> tuple[torch.Tensor, ...]:
        indices = next(self._index_batches)
        self.taken += 1
        return tuple(tensor.index_select(0, indices.to(tensor.device)) for tensor in self.data)


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
        epoch = _Epoch(self._tensors, self.sampler, self._index_batches())
        alone.note_walk(epoch)
        return epoch

    def _index_batches(self) -> Iterator[torch.Tensor]:
        if isinstance(self.sampler, ShardedSampler):
            yield from self.sampler.index_batches(self._batch_size, self._drop_last)
            return
        with Dealing(self.sampler) as dealing:
            for indices in torch.utils.data.BatchSampler(self.sampler, self._batch_size, self._drop_last):
                dealing.deal(len(indices))
                yield torch.as_tensor(indices, device="cpu")


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
    sampler = ShardedSampler(dataset, 1, 0, shuffle=False) if sampler is None else sampler
    own = sampler.batch_size if isinstance(sampler, ShardedSampler) else None
    size = own if batch_size is None else batch_size
    if size is None or size < 1 or own not in (None, size):
        wanted = "at least 1" if own is None else f"the sampler's {own}"
        raise ValueError(f"batch_size is {batch_size}; it must be {wanted}")
    return Batches(dataset.tensors, sampler, size, drop_last)
