"""A data set that lies in memory as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from paceline.data.partition import shard_bounds


class ArrayDataset(TensorDataset):
    """Tensors of equal length, indexed together: one sample, a slice, or a whole batch at a time.

    ``dataset[index_tensor]`` returns a batch with one gather per tensor, with no Python work per sample.
    With a torch ``DataLoader`` it works as usual; give it ``sampler=BatchSampler(...), batch_size=None`` to fetch
    whole batches there too.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        """Keep the tensors, without a copy.

        Raises:
            ValueError: no tensor is given, or their first dimensions differ.
        """
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
        batch = self[torch.as_tensor(indices)]
        return list(zip(*(tensor.unbind() for tensor in batch), strict=True))

    def shard(self, num_parts: int, part_index: int) -> ArrayDataset:
        """Return one of ``num_parts`` contiguous parts (views, not copies); the first ones get what is left over.

        Use :class:`paceline.data.ShardedSampler` instead where all workers must see equally many batches.

        Raises:
            ValueError: there is no such part.
        """
        start, stop = shard_bounds(len(self), num_parts, part_index)
        return ArrayDataset(*(tensor[start:stop] for tensor in self.tensors))
