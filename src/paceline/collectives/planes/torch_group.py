"""Collective operations by a process group of torch.distributed: Gloo, or NCCL for CUDA tensors."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.collectives.errors import CollectiveError
from paceline.collectives.planes.base import AVERAGE, MAX, MIN, PRODUCT, SUM, Reduction
from paceline.naming import listed

_OPS = {
    AVERAGE: dist.ReduceOp.SUM,
    SUM: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}

#: Dtypes that Gloo does not know, and wider ones that hold the same numbers.
_WIDER = {torch.int16: torch.int32, torch.bool: torch.uint8}


class GroupPlane:
    """The plane of a process group."""

    def __init__(self, group: Any, index: int, size: int) -> None:
        self._group = group
        self.index, self.size = index, size
        # The destructor of ProcessGroupGloo joins its threads while it holds the interpreter's lock, which they may be
        # waiting for. So groups are never destroyed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _do(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"{self._group.name()} failed: {error}") from error

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce, half floats in float32."""
        work = how.load_into(source, target)
        work = work.to(_WIDER.get(work.dtype, work.dtype))
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[how.op]
        self._do(self._group.allreduce([work], options))
        how.store(work, target)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Send the root's bytes."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._do(self._group.broadcast([tensor.view(torch.uint8)], options))

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Gather parts that are padded to the largest."""
        longest = max(counts)
        mine = source.new_zeros(longest)
        mine[: source.numel()] = source
        parts = [torch.empty_like(mine).view(torch.uint8) for _ in counts]
        self._do(self._group.allgather([parts], [mine.view(torch.uint8)]))
        for part, count, place in zip(parts, counts, torch.split(target, list(counts)), strict=True):
            place.copy_(part.view(source.dtype)[:count])

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Exchange parts of unlike size."""
        width = source.element_size()
        sent = [width * count for count in counts[self.index]]
        received = [width * row[self.index] for row in counts]
        mine = source[: sum(counts[self.index])].view(torch.uint8)
        self._do(self._group.alltoall_base(target.view(torch.uint8), mine, received, sent, dist.AllToAllOptions()))

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Reduce everything, and keep this rank's part."""
        whole = torch.empty_like(source)
        self.allreduce(source, whole, how)
        first = sum(counts[: self.index])
        target.copy_(whole[first : first + counts[self.index]])


def make_gloo(store: Store, index: int, size: int, timeout_s: float, address: str) -> GroupPlane:
    """Return a plane of Gloo, whose members meet at a store of their own and reach this host at ``address``."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        return GroupPlane(gloo(store, index, size, options), index, size)
    except RuntimeError as error:
        raise CollectiveError(f"Gloo could not connect {size} ranks: {error}") from error


def nccl_is_available() -> bool:
    """Return whether NCCL can be used here."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def own_gpu() -> str:
    """Return what tells the current GPU of this thread from those of all hosts; "": NCCL cannot use one here."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if nccl_is_available() else ""


def gpus_are_apart(store: Store, rank: int, members: Sequence[int], gpu: str, timeout_s: float) -> bool:
    """Return whether each member has a GPU of its own, which NCCL needs. Every member tells its :func:`own_gpu`.

    Raises:
        CollectiveError: a member did not tell its GPU in time.
    """
    deadline = time.monotonic() + timeout_s
    store.set(str(rank), gpu or "none")
    found = []
    for one in members:
        try:
            store.wait([str(one)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            found.append(store.get(str(one)))
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {rank}: rank {one} did not tell its GPU within {timeout_s:g} s, so ranks {listed(members, 8)} "
                f"cannot agree on NCCL: {error}"
            ) from error
    return b"none" not in found and len(set(found)) == len(found)


def make_nccl(store: Store, index: int, size: int, timeout_s: float) -> GroupPlane:
    """Return a plane of NCCL, for tensors on this process's own GPU, which :func:`gpus_are_apart` has found."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return GroupPlane(dist.ProcessGroupNCCL(store, index, size, options), index, size)
