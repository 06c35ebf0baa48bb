"""The buckets of a store on one server, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.errors import KeyMismatchError, ProtocolError
from paceline.server.bucket import StoredBucket
from paceline.server.memory import ValueMemory, map_buckets
from paceline.wire import messages as m


class Buckets:
    """Buckets by (block, index).

    Args:
        store: name, for messages.
        shared: keep values in shared memory, so that workers of this host can map them.
    """

    def __init__(self, store: str, shared: bool) -> None:
        self._store = store
        self._memory = ValueMemory(shared)
        self._buckets: dict[tuple[int, int], StoredBucket] = {}

    def __iter__(self) -> Iterator[StoredBucket]:
        return iter(self._buckets.values())

    def __contains__(self, place: object) -> bool:
        return place in self._buckets

    def get(self, block: int, index: int) -> StoredBucket:
        """Return a bucket.

        Raises:
            KeyMismatchError: it was not initialised here.
        """
        found = self._buckets.get((block, index))
        if found is None:
            raise KeyMismatchError(f"bucket {index} of block {block} of store {self._store!r} is not initialised here")
        return found

    def add(self, buckets: Sequence[StoredBucket]) -> None:
        """Add new buckets."""
        self._buckets |= {bucket.place: bucket for bucket in buckets}

    def of_block(self, block: int) -> dict[int, StoredBucket]:
        """Return the buckets of a block that are here, by index."""
        return {index: bucket for (one, index), bucket in self._buckets.items() if one == block}

    # ---- entries ---------------------------------------------------------------------------------------------------

    def checked(self, entry: m.Entry | m.AbsentRange) -> StoredBucket:
        """Return the bucket of an entry.

        Raises:
            KeyMismatchError: it was not initialised here.
            ProtocolError: the entry lies outside of it, or is a part of a bucket that is pushed as a whole.
        """
        bucket = self.get(entry.block, entry.bucket)
        if not bucket.in_range(entry.start, entry.length):
            raise ProtocolError(
                f"elements {entry.start} to {entry.start + entry.length} of a bucket of {bucket.values.numel()}"
            )
        if bucket.answers is not None and (entry.start, entry.length) != (0, bucket.values.numel()):
            raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} is pushed and read as a whole")
        return bucket

    # ---- memory ----------------------------------------------------------------------------------------------------

    def settle(self, block: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the values of a block's buckets, in the memory where they stay."""
        return self._memory.settle(block, values)

    def map_arena(self, worker: int, request: m.MapArena) -> None:
        """Map a worker's shared memory for the buckets of a block.

        Raises:
            KeyMismatchError: no bucket of the block is here.
            ProtocolError: the memory is not what the request says, or too small.
        """
        buckets = self.of_block(request.block)
        if not buckets:
            raise KeyMismatchError(f"block {request.block} of store {self._store!r} has no bucket here")
        map_buckets(buckets, worker, request, ours=self.values_at(request.block) is not None)

    def close(self) -> None:
        """Release shared memory; the values stay as long as anybody refers to them."""
        self._memory.close()

    def values_at(self, block: int) -> tuple[int, list[int]] | None:
        """Return the memfd that holds the values of a block here, and the first element of every bucket in it."""
        return self._memory.place(block)
