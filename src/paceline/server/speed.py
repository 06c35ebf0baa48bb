"""How fast a server serves, measured when it starts."""

from __future__ import annotations

import time

import torch

#: Elements of a measurement: more than caches hold, and what a server sums in milliseconds.
_ELEMENTS, _TRIALS = 1 << 22, 5


def measure() -> float:
    """Return how many elements a second one thread of this host sums and applies: the best of a few trials."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        value, total, gradient = (torch.zeros(_ELEMENTS) for _ in range(3))
        return _ELEMENTS / min(_seconds(value, total, gradient) for _ in range(_TRIALS))
    finally:
        torch.set_num_threads(threads)


def _seconds(value: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor) -> float:
    begun = time.perf_counter()
    total.add_(gradient)
    value.add_(total, alpha=-0.1)
    return time.perf_counter() - begun
