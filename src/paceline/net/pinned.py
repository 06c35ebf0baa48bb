"""Page-locked host memory, which CUDA devices read and write directly."""

from __future__ import annotations

import torch


def pin(memory: torch.Tensor) -> bool:
    """Lock the host memory of a tensor; returns whether that worked. Without it copies are slower, and as correct."""
    if not memory.numel():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0  # type: ignore[no-untyped-call]


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
