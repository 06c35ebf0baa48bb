"""Host memory that CUDA devices read and write by themselves."""

from __future__ import annotations

import torch


def pin(memory: torch.Tensor) -> bool:
    """Lock host memory of a tensor, so that devices copy from and to it by themselves; tells whether it worked.

    Without it copies are as correct, and slower.
    """
    if not memory.numel():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0  # type: ignore[no-untyped-call]


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
