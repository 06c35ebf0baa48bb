"""The arithmetic of reductions, the interface of a plane, and the planes that need no other process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.layout.tensors import host_buffer, to_host

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT, BAND, BOR, BXOR = range(9)

_HALF = (torch.float16, torch.bfloat16)

_COMBINE: Mapping[int, Callable[..., torch.Tensor]] = {
    AVERAGE: torch.add,
    SUM: torch.add,
    MIN: torch.minimum,
    MAX: torch.maximum,
    PRODUCT: torch.mul,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True)
class Reduction:
    """How elements of several ranks become one.

    Half floats are computed in float32. Integers are exact: a mean is the sum in 64 bits, divided and truncated; other
    factors than 1 are applied in float64, with truncation.

    Attributes:
        op: number of the operation, without Adasum.
        dtype: the dtype of the tensors.
        size: number of ranks, for the mean.
        prescale: factor before.
        postscale: factor after.
    """

    op: int
    dtype: torch.dtype
    size: int
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype in which elements are combined."""
        if self.dtype in _HALF:
            return torch.float32
        if self.dtype.is_floating_point or self.op not in (AVERAGE, PRODUCT):
            return self.dtype
        return torch.int64

    @property
    def is_plain(self) -> bool:
        """Whether elements are combined as they are."""
        return self.work_dtype == self.dtype and self.prescale == 1.0

    @property
    def factor(self) -> float:
        """The factor after the reduction of floats."""
        return self.postscale / self.size if self.op == AVERAGE else self.postscale

    def load(self, source: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is combined; the tensor itself if that is the same."""
        if self.is_plain:
            return source
        if self.dtype.is_floating_point:
            return source.to(self.work_dtype) * self.prescale
        if self.prescale == 1.0:
            return source.to(self.work_dtype)
        return (source.double() * self.prescale).trunc().to(self.work_dtype)

    def load_into(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is combined, which may be overwritten: ``target`` if elements are combined as are."""
        work = self.load(source)
        if work is not source:
            return work
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
        return target

    def store(self, work: torch.Tensor, target: torch.Tensor) -> None:
        """Write a combined tensor to its place; ``work`` may be ``target``."""
        if self.dtype.is_floating_point:
            if self.factor != 1.0:
                work.mul_(self.factor)
            if work is not target:
                target.copy_(work)
        elif self.postscale != 1.0:
            target.copy_((work.double() * self.factor).trunc())
        elif self.op == AVERAGE and self.size > 1:
            target.copy_(torch.div(work, self.size, rounding_mode="trunc"))
        elif work is not target:
            target.copy_(work)

    def reduce(self, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Combine tensors in their order, into ``target``, which is none of them but perhaps one of the first two."""
        if len(sources) == 1:
            self.store(self.load_into(sources[0], target), target)
            return
        combine, is_plain = _COMBINE[self.op], self.is_plain
        work = target if is_plain else torch.empty_like(target, dtype=self.work_dtype)
        parts = iter(sources if is_plain else map(self.load, sources))
        combine(next(parts), next(parts), out=work)
        for part in parts:
            combine(work, part, out=work)
        self.store(work, target)


#: Squared norms below this count as zero (Horovod's limit).
_TINY = math.sqrt(2.2250738585072014e-308)


def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the ranks' tensors in pairs of ranks, then in pairs of pairs, and so on.

    Args:
        parts: one tensor per rank, a power of 2 of them.

    Returns:
        A new tensor, in the work precision: float64 for float64, else float32.
    """
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    level = [part.to(wide) for part in parts]
    while len(level) > 1:
        level = [_pair(level[one], level[one + 1]) for one in range(0, len(level), 2)]
    return level[0]


def _pair(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    a, b = one.double(), other.double()
    dot, a2, b2 = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    alpha = 1.0 if a2 < _TINY else 1.0 - dot / (2 * a2)
    beta = 1.0 if b2 < _TINY else 1.0 - dot / (2 * b2)
    return (alpha * a + beta * b).to(one.dtype)


class Plane(Protocol):
    """Collective operations of the members of one process set, on flat contiguous tensors.

    All members call the same methods in the same order. ``index`` is this rank's place among the members.
    """

    index: int
    size: int

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce all members' ``source`` into ``target``, which may be ``source``."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite ``tensor`` with that of the member ``root``."""

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Put all members' ``source`` one after the other; ``counts`` are their elements."""

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Send elements to each member: ``counts[sender][receiver]``."""

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Reduce, and put this member's part into ``target``; ``counts`` are the elements of the members' parts."""


class Alone:
    """The plane of a process set of one member."""

    index, size = 0, 1

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Apply the factors."""
        how.reduce([source], target)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Do nothing."""

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Copy."""
        target.copy_(source)

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Copy."""
        target.copy_(source[: counts[0][0]])

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Apply the factors."""
        how.reduce([source], target)


class Staged:
    """A plane that copies to CPU memory, and back; tensors that are there stay."""

    def __init__(self, inner: Plane) -> None:
        self._inner = inner
        self.index, self.size = inner.index, inner.size

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce in CPU memory."""
        if source.is_cpu:
            self._inner.allreduce(source, target, how)
            return
        work = to_host(source)
        self._inner.allreduce(work, work, how)
        target.copy_(work)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast in CPU memory."""
        work = to_host(tensor)
        self._inner.broadcast(work, root)
        tensor.copy_(work)

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Gather in CPU memory."""
        self._by_host(self._inner.allgather, source, target, counts)

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Exchange in CPU memory."""
        self._by_host(self._inner.alltoall, source, target, counts)

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Reduce in CPU memory."""
        self._by_host(self._inner.reducescatter, source, target, counts, how)

    @staticmethod
    def _by_host(run: Callable[..., None], source: torch.Tensor, target: torch.Tensor, *how: Any) -> None:
        work = host_buffer(target)
        run(to_host(source), work, *how)
        target.copy_(work)
