"""Allreduce of several hosts: through shared memory inside each host, by one rank of each host over the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.hvd.planes.base import AVERAGE, SUM, Plane, Reduction


class HierarchicalPlane:
    """The plane of a process set on several hosts.

    Args:
        everyone: the plane of all members, for what is not hierarchical.
        near: the plane of the members on this host.
        leaders: the plane of the first members of each host; None where this rank is not one of them.
    """

    def __init__(self, everyone: Plane, near: Plane, leaders: Plane | None) -> None:
        self._everyone, self._near, self._leaders = everyone, near, leaders
        self.index, self.size = everyone.index, everyone.size

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce on each host, then among the hosts' leaders, then copy to the others of each host.

        Factors are applied before the first and after the last reduction, so rounding is as without levels.
        """
        work = how.load(source)
        inner = Reduction(SUM if how.op == AVERAGE else how.op, work.dtype, self.size)
        if work is source:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
            work = target
        self._near.allreduce(work, work, inner)
        if self._leaders is not None:
            self._leaders.allreduce(work, work, replace(inner, size=self._leaders.size))
        self._near.broadcast(work, 0)
        how.store(work, target)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast among all."""
        self._everyone.broadcast(tensor, root)

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Gather among all."""
        self._everyone.allgather(source, target, counts)

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Exchange among all."""
        self._everyone.alltoall(source, target, counts)

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Reduce as :meth:`allreduce`, and keep this rank's part."""
        whole = torch.empty_like(source)
        self.allreduce(source, whole, how)
        first = sum(counts[: self.index])
        target.copy_(whole[first : first + counts[self.index]])

    def barrier(self) -> None:
        """Wait for all."""
        self._everyone.barrier()

    def close(self) -> None:
        """Close all levels."""
        for plane in (self._everyone, self._near, self._leaders):
            if plane is not None:
                plane.close()
