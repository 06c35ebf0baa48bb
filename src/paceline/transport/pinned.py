"""Pinned host memory, which CUDA devices read and write without the processor."""

from __future__ import annotations

import torch


def pin(memory: torch.Tensor) -> bool:
    """Pin the host memory of a tensor; returns whether that worked. Copies are correct without it, but slower."""
    if not memory.numel():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0  # type: ignore[no-untyped-call]


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
