"""The memory of a server's values: private, or in files that workers of its host map."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from paceline.errors import ProtocolError
from paceline.net.memory import MappedArena, SharedTensor, map_foreign, pages
from paceline.server.bucket import StoredBucket
from paceline.wire import messages as m

logger = logging.getLogger(__name__)


class ValueMemory:
    """Memory for the values of a store.

    Args:
        shared: make files, one per block, in which every bucket starts on a page.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._files: dict[int, tuple[SharedTensor, list[int]]] = {}

    def settle(self, block: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the values of a block's buckets, in the memory where they stay."""
        if not self._shared or not values:
            return [value.clone() for value in values]
        dtype = values[0].dtype
        *starts, numel = accumulate((pages(value.numel(), dtype) for value in values), initial=0)
        try:
            file = SharedTensor(numel, dtype)
        except OSError as error:
            logger.warning("no shared memory for %d values (%s); workers get copies by sockets", numel, error)
            return [value.clone() for value in values]
        self._files[block] = file, starts
        placed = [file.tensor[start : start + value.numel()] for start, value in zip(starts, values, strict=True)]
        for own, value in zip(placed, values, strict=True):
            own.copy_(value)
        return placed

    def close(self) -> None:
        """Close the files. The kernel frees their memory when nobody maps it any more."""
        for file, _ in self._files.values():
            file.close()
        self._files = {}

    def place(self, block: int) -> tuple[int, list[int]] | None:
        """Return the memfd of a block and the first element of every bucket in it, or None where there is no file."""
        found = self._files.get(block)
        return None if found is None else (found[0].fd, found[1])


def map_buckets(buckets: Mapping[int, StoredBucket], worker: int, request: m.MapArena, ours: bool) -> None:
    """Map a worker's shared memory for buckets of one block, given by their index.

    Args:
        buckets: at least one.
        worker: its rank.
        request: where its memory is.
        ours: the values of the block are in a file of this server, which the worker can map.

    Raises:
        ProtocolError: its memory is not what it says, or too small.
    """
    dtype = next(iter(buckets.values())).values.dtype
    numel = request.size_bytes // dtype.itemsize
    ends = [request.starts[i] + b.values.numel() for i, b in buckets.items() if i < len(request.starts)]
    if len(ends) != len(buckets) or max(ends) > numel:
        raise ProtocolError(f"the arena of block {request.block} does not hold its buckets")
    if request.value_fd < 0 and not ours:
        raise ProtocolError(f"the values of block {request.block} are not in shared memory")
    values = map_foreign(request.pid, request.value_fd, numel, dtype) if request.value_fd >= 0 else None
    grads = map_foreign(request.pid, request.grad_fd, numel, dtype)
    for index, bucket in buckets.items():
        part = slice(request.starts[index], request.starts[index] + bucket.values.numel())
        bucket.arenas[worker] = MappedArena(None if values is None else values[part], grads[part])
