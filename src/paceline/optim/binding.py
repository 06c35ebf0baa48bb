"""Parameters and the arena: gradients are copied in, merged gradients or weights are copied out.

The arena is never the user's memory. Servers may read it, and write it, at any time of a round, while ``param.data``
and ``param.grad`` belong to this process alone: whatever a training loop does to them reaches nobody by itself.

Where a parameter is on a CUDA device, copies run beside the computation, on a side stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.errors import PacelineError
from paceline.kvstore.dist import DistStore
from paceline.optim.device import SideStream, side_streams
from paceline.worker.block import BucketRange, WorkerBlock


@dataclass(eq=False)
class Bound:
    """One parameter and its place in the arena."""

    name: str
    param: torch.nn.Parameter
    block: WorkerBlock
    index: int
    ranges: tuple[BucketRange, ...]
    """Where the parameter lies in buckets."""
    value: torch.Tensor
    grad: torch.Tensor
    side: SideStream | None = None
    """Where copies run, for parameters on CUDA devices."""
    absent: bool = False
    """There was no gradient at the last :meth:`put_grad`."""
    put: torch.Tensor | None = None
    """The gradient at the last :meth:`put_grad`."""
    put_version: int = 0

    def put_grad(self) -> torch.cuda.Event | None:
        """Copy the gradient into the arena; without one ``absent`` is True.

        Returns:
            What tells when it is there, where that takes time beside the computation; else None.
        """
        self._check_kind()
        grad = self.param.grad
        self.put, self.absent = grad, grad is None
        if grad is None:
            return None
        self.put_version = grad._version
        dense = grad.to_dense() if grad.is_sparse else grad
        if self.side is not None:
            return self.side.fetch(dense, self.grad)
        self.grad.copy_(dense)
        return None

    def _check_kind(self) -> None:
        if self.param.dtype != self.value.dtype or self.param.shape != self.value.shape:
            raise PacelineError(
                f"parameter {self.name!r} was {self.value.dtype} {tuple(self.value.shape)} when it was given to "
                f"DistributedOptimizer and is {self.param.dtype} {tuple(self.param.shape)} now; convert the model first"
            )

    def grad_changed(self) -> bool:
        """Tell whether the gradient is not what :meth:`put_grad` has put."""
        grad = self.param.grad
        if grad is not self.put or (grad is not None and grad._version != self.put_version):
            return True
        return grad is not None and not grad.is_sparse and not same_bits(grad, self.grad)

    def weight_changed(self) -> bool:
        """Tell whether the parameter is not the arena's value."""
        return not same_bits(self.param.data, self.value)

    def take_weight(self) -> None:
        """Copy the arena's value to the parameter."""
        self._copy_out(self.param)

    def take_grad(self) -> None:
        """Copy the arena's value, a merged gradient, to ``param.grad``."""
        grad = self.param.grad
        if grad is None or not _takes_values(grad):
            grad = self.param.grad = torch.empty_like(self.param)
        self._copy_out(grad)

    def _copy_out(self, target: torch.Tensor) -> None:
        if self.side is None:
            target.copy_(self.value)
        else:
            self.side.bring(self.value, target)

    @property
    def missing(self) -> bool:
        """Whether no worker had a gradient in the last round."""
        return self.absent and self.block.is_missing(self.index)


@torch.no_grad()
def take_all(bound: Iterable[Bound], weights: bool) -> None:
    """Copy the arena's values of several parameters out: to the weights, or to the gradients."""
    targets, values = [], []
    for one in bound:
        target = one.param.data if weights else one.param.grad
        if one.side is None and target is not None and _takes_values(target):
            targets.append(target)
            values.append(one.value)
        elif weights:
            one.take_weight()
        else:
            one.take_grad()
    if targets:
        torch._foreach_copy_(targets, values)


def _takes_values(target: torch.Tensor) -> bool:
    """Tell whether values can be copied there: not into rows, a graph, or elements that are one (``expand``)."""
    if target.layout is not torch.strided or target.requires_grad:
        return False
    return not any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one shape and dtype hold the same bits, NaN included."""
    if one.device.type == other.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        return not _libc.memcmp(one.data_ptr(), other.data_ptr(), one.numel() * one.itemsize)
    return torch.equal(one.to(other.device).nan_to_num(), other.nan_to_num())


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def bind_keys(
    store: DistStore, names: Sequence[str], params: Sequence[torch.nn.Parameter], tags: Sequence[int]
) -> list[Bound]:
    """Initialise keys for parameters, tie them to their places, and give the parameters rank 0's weights.

    Args:
        store: of the keys.
        names: of the keys.
        params: in the same order.
        tags: in the same order; keys of unlike tags share no bucket.
    """
    blocks = store.add_keys(names, [param.data for param in params], tags)
    store.traffic.refresh(store.table.plan(tuple(names)))
    bound = _bind(names, params, blocks)
    take_all(bound, weights=True)
    return bound


def _bind(names: Sequence[str], params: Sequence[torch.nn.Parameter], blocks: Sequence[WorkerBlock]) -> list[Bound]:
    """Tie parameters to their places in the arenas.

    Args:
        names: of the keys.
        params: in the same order.
        blocks: where the keys are.
    """
    sides = side_streams(list(params))
    if sides:
        for block in blocks:
            block.pin()
    bound = []
    for name, param in zip(names, params, strict=True):
        block = next(block for block in blocks if name in block.key_index)
        index = block.key_index[name]
        ranges = tuple(block.ranges([index]))
        one = Bound(name, param, block, index, ranges, block.value_of(index), block.grad_of(index))
        one.side = sides.get(param.device)
        bound.append(one)
    return bound
