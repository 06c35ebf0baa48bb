"""The buckets of a store on one server, and their memory: private, or in files that workers of its host map."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from paceline.errors import KeyMismatchError, ProtocolError
from paceline.net.memory import MappedArena, SharedTensor, map_foreign, pages
from paceline.server.bucket import StoredBucket
from paceline.wire import messages as m

logger = logging.getLogger(__name__)


def check_once(spans: Sequence[m.Span], what: str) -> None:
    """Refuse a request that names an element twice: its answer could be any number of times as large as the values.

    Raises:
        ProtocolError: it does.
    """
    for one, other in pairwise(sorted(spans)):
        if one.place == other.place and other.start < one.start + max(1, one.length):
            raise ProtocolError(f"element {other.start} of bucket {one.bucket} is {what} more than once by one request")


class Buckets:
    """Buckets by (block, index).

    Args:
        store: name, for messages.
        shared: keep values in files, one per block, in which every bucket starts on a page.
    """

    def __init__(self, store: str, shared: bool) -> None:
        self._store, self._shared = store, shared
        self._buckets: dict[tuple[int, int], StoredBucket] = {}
        self._files: dict[int, tuple[SharedTensor, list[int]]] = {}
        """By block: its file, and the first element of every bucket in it."""

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

    def has_block(self, block: int) -> bool:
        """Tell whether a bucket of a block is here."""
        return any(one == block for one, _ in self._buckets)

    def checked(self, span: m.Span) -> StoredBucket:
        """Return the bucket of a range that a request names.

        Raises:
            KeyMismatchError: it was not initialised here.
            ProtocolError: the range lies outside of it, or is a part of a bucket that is pushed as a whole.
        """
        bucket = self._buckets.get((span.block, span.bucket)) or self.get(span.block, span.bucket)
        numel = bucket.values.numel()
        if not 0 <= span.start <= numel - span.length or (span.length == 0 and numel > 0):
            raise ProtocolError(f"elements {span.start} to {span.stop} of a bucket of {numel}")
        if bucket.answers is not None and span.length != numel:
            raise ProtocolError(f"bucket {span.bucket} of block {span.block} is pushed and read as a whole")
        return bucket

    # ---- memory ----------------------------------------------------------------------------------------------------

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
        """Close the files; the values stay as long as anybody maps them or refers to them."""
        for file, _ in self._files.values():
            file.close()
        self._files = {}

    def values_at(self, block: int) -> tuple[int, list[int]] | None:
        """Return the memfd of a block and the first element of every bucket in it, or None where there is no file."""
        found = self._files.get(block)
        return None if found is None else (found[0].fd, found[1])

    def map_arena(self, worker: int, request: m.MapArena) -> None:
        """Map a worker's shared memory for the buckets of a block.

        Raises:
            KeyMismatchError: no bucket of the block is here.
            ProtocolError: the memory does not match the request, or is too small.
        """
        buckets = {index: bucket for (block, index), bucket in self._buckets.items() if block == request.block}
        if not buckets:
            raise KeyMismatchError(f"block {request.block} of store {self._store!r} has no bucket here")
        dtype = next(iter(buckets.values())).values.dtype
        numel = request.size_bytes // dtype.itemsize
        ends = [request.starts[i] + b.values.numel() for i, b in buckets.items() if i < len(request.starts)]
        if len(ends) != len(buckets) or max(ends) > numel:
            raise ProtocolError(f"the arena of block {request.block} does not hold its buckets")
        if request.value_fd < 0 and request.block not in self._files:
            raise ProtocolError(f"the values of block {request.block} are not in shared memory")
        values = map_foreign(request.pid, request.value_fd, numel, dtype) if request.value_fd >= 0 else None
        grads = map_foreign(request.pid, request.grad_fd, numel, dtype)
        for index, bucket in buckets.items():
            part = slice(request.starts[index], request.starts[index] + bucket.values.numel())
            bucket.arenas[worker] = MappedArena(None if values is None else values[part], grads[part])
