"""The state of the random number generators of a training loop: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state() -> dict[str, Any]:
    """Return the state of this process's generators, as plain data and tensors; CUDA's only if CUDA is in use."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (name, torch.from_numpy(np.array(keys)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_state(state: dict[str, Any]) -> None:
    """Set a state of :func:`state`; states of CUDA devices that do not exist here are ignored."""
    version, words, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state((name, keys.numpy(), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)
