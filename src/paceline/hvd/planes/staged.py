"""Tensors of an accelerator by way of CPU memory, where no process group takes them as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.hvd.planes.base import Plane, Reduction


class Staged:
    """A plane that copies to CPU memory, and back.

    Args:
        inner: the plane that takes CPU tensors.
    """

    def __init__(self, inner: Plane) -> None:
        self._inner = inner
        self.index, self.size = inner.index, inner.size

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce in CPU memory."""
        work = source.cpu()
        self._inner.allreduce(work, work, how)
        target.copy_(work)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast in CPU memory."""
        work = tensor.cpu()
        self._inner.broadcast(work, root)
        tensor.copy_(work)

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Gather in CPU memory."""
        work = torch.empty_like(target, device="cpu")
        self._inner.allgather(source.cpu(), work, counts)
        target.copy_(work)

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Exchange in CPU memory."""
        work = torch.empty_like(target, device="cpu")
        self._inner.alltoall(source.cpu(), work, counts)
        target.copy_(work)

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Reduce in CPU memory."""
        work = torch.empty_like(target, device="cpu")
        self._inner.reducescatter(source.cpu(), work, counts, how)
        target.copy_(work)

    def barrier(self) -> None:
        """Wait for all."""
        self._inner.barrier()

    def close(self) -> None:
        """Close the inner plane."""
        self._inner.close()
