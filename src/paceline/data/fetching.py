"""Whether a ``DataLoader`` fetches batches ahead of the loop that trains on them."""

from __future__ import annotations

import sys
from types import FrameType

from torch.utils.data import DataLoader

#: Calls of torch between a sampler and the loader that begins to walk it; there are five.
_DEPTH = 10


def fetched_ahead() -> int:
    """Return how many batches the ``DataLoader`` that begins to walk a sampler fetches ahead; 0: none, or no loader.

    A loader with workers takes its first batches before its loop begins, so the loader is among the callers of the
    sampler's first batch. Any other caller takes a batch when it needs one.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            break
        loader = frame.f_locals.get("self")
        if isinstance(loader, DataLoader):
            return loader.num_workers * (loader.prefetch_factor or 0)
        frame = frame.f_back
    return 0
