"""Where a server keeps its values: in memory of its own, or in files that workers of its host map."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch

from paceline.transport.shared import SharedTensor, pages

logger = logging.getLogger(__name__)


class Home:
    """Memory for the values of a store.

    Args:
        shared: make files, one per block, in which every bucket starts on a page.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._files: dict[int, tuple[SharedTensor, list[int]]] = {}

    def settle(self, block: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the values of a block's buckets, where they are to stay."""
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
        homes = [file.tensor[start : start + value.numel()] for start, value in zip(starts, values, strict=True)]
        for home, value in zip(homes, values, strict=True):
            home.copy_(value)
        return homes

    def place(self, block: int) -> tuple[int, list[int]] | None:
        """Return the memfd of a block and the first element of every bucket in it, or None where there is no file."""
        found = self._files.get(block)
        return None if found is None else (found[0].fd, found[1])
