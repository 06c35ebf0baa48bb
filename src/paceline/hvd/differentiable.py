"""The synchronous operations, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch.autograd.function import Function

from paceline.collectives import operations as base
from paceline.collectives import world
from paceline.collectives.operations import Average, Sum, resolve_op, synchronize
from paceline.collectives.process_sets import ProcessSet, global_process_set, members_of
from paceline.hvd.compression import Compression, Compressor

__all__ = [
    "allgather", "allreduce", "allreduce_", "alltoall", "broadcast", "broadcast_", "grouped_allgather",
    "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter", "reducescatter",
]  # fmt: skip


_P = ParamSpec("_P")


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def _waiting(start: Callable[_P, int], name: str) -> Callable[_P, Any]:
    """Return an asynchronous operation in place as one that waits, and returns the tensors that it has overwritten."""

    def run(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        return synchronize(start(*args, **kwargs))

    functools.update_wrapper(run, start, assigned=())
    run.__doc__ = f"Wait for what :func:`{start.__name__}` starts; returns the tensor or tensors that it overwrites."
    run.__name__ = run.__qualname__ = name
    return run


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, factors: Any, process_set: Any, *tensors: torch.Tensor) -> Any:
        ctx.how = op, factors, process_set
        pre, post = factors
        return tuple(synchronize(base.grouped_allreduce_async(tensors, None, name, op, pre, post, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, factors, process_set = ctx.how
        return (None, None, None, None, *_apply(_Allreduce, None, op, factors, process_set, *grads))


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: Any, *tensors: torch.Tensor) -> Any:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]
        return tuple(synchronize(base.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        index = members_of(ctx.process_set)[1].index(world.current().rank)
        rows = torch.tensor(ctx.rows, device="cpu")
        every = synchronize(base.allgather_async(rows, None, ctx.process_set)).view(-1, len(grads))
        reduced = synchronize(base.grouped_allreduce_async(grads, None, None, Average, 1.0, 1.0, ctx.process_set))
        starts = every[:index].sum(0).tolist()
        parts = [grad[start : start + mine] for grad, start, mine in zip(reduced, starts, ctx.rows, strict=True)]
        return (None, None, *parts)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: Any) -> Any:
        ctx.how = root, process_set
        return synchronize(base.broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        root, process_set = ctx.how
        reduced = synchronize(base.allreduce_async(grads[0], None, None, Average, 1.0, 1.0, process_set))
        return reduced if world.current().rank == root else reduced * 0, None, None, None


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: Any) -> Any:
        received, counts = synchronize(base.alltoall_async(tensor, splits, name, process_set))
        ctx.how = counts, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        counts, process_set, rows = ctx.how
        back, _ = synchronize(base.alltoall_async(grads[0], counts, None, process_set))
        if back.shape[0] < rows:  # rows that were sent to nobody
            back = torch.cat([back, back.new_zeros((rows - back.shape[0], *back.shape[1:]))])
        return back, None, None, None


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, factors: Any, process_set: Any, *tensors: torch.Tensor) -> Any:
        ctx.how = op, factors, process_set
        handle = base.grouped_reducescatter_async(tensors, name, op, process_set, *factors)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, (pre, post), process_set = ctx.how
        factor = pre * post * (len(members_of(process_set)[1]) if op == Sum else 1)
        scaled = [grad * factor for grad in grads] if factor != 1 else list(grads)
        return (None, None, None, None, *synchronize(base.grouped_allgather_async(scaled, None, process_set)))


# ---- the interface ---------------------------------------------------------------------------------------------------

allreduce_ = _waiting(base.allreduce_async_, "allreduce_")
grouped_allreduce_ = _waiting(base.grouped_allreduce_async_, "grouped_allreduce_")
broadcast_ = _waiting(base.broadcast_async_, "broadcast_")


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of a tensor over all ranks; see :func:`allreduce_async`. Differentiable.

    The gradient is reduced in the same way.
    """
    factors = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of tensors that belong together. Differentiable."""
    number = resolve_op(op, average)
    pairs = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    outs = _apply(_Allreduce, name, number, factors, process_set, *[compressed for compressed, _ in pairs])
    return [compression.decompress(one, context) for one, (_, context) in zip(outs, pairs, strict=True)]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return all ranks' tensors, concatenated along the first dimension. Differentiable."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather tensors that belong together. Differentiable."""
    return list(_apply(_Allgather, name, process_set, *tensors))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return a new tensor with the content of that of ``root_rank``. Differentiable."""
    result: torch.Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all members sent here; with ``splits`` also how many from each. Differentiable."""
    received, counts = _apply(_Alltoall, tensor, splits, name, process_set)
    return received if splits is None else (received, counts)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction. Differentiable."""
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter tensors that belong together. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outs = _apply(
        _Reducescatter, name, op, (prescale_factor, postscale_factor), process_set, *[one for one, _ in pairs]
    )
    return [compression.decompress(one, context) for one, (_, context) in zip(outs, pairs, strict=True)]
