"""Memory in which sums are made: lent to a cohort while it is open, and then to another."""

from __future__ import annotations

import torch


class Scratch:
    """Flat tensors that are lent and given back. The last one given back is lent first: it is still in the cache.

    A server has many buckets, and most of the time sums but one of them: a buffer for each would be as large as the
    model, and cold at every use.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of any content, of at least ``numel`` elements; the borrower uses a part of it."""
        free = self._free.setdefault(dtype, [])
        for index in range(len(free) - 1, -1, -1):
            if free[index].numel() >= numel:
                return free.pop(index)
        if free:
            free.pop()  # a larger one takes its place
        return torch.empty(numel, dtype=dtype)

    def give_back(self, lent: torch.Tensor) -> None:
        """Take back what was lent; nobody uses it any more."""
        self._free[lent.dtype].append(lent)
