"""Horovod's verbs for tensors, and their gradients: one table over the operations of :mod:`paceline.collectives`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd.function import Function

from paceline.collectives import operations as start
from paceline.collectives import world
from paceline.collectives.operations import Average, Sum, resolve_op, synchronize
from paceline.collectives.process_sets import ProcessSet, global_process_set, members_of
from paceline.hvd.compression import Compression, Compressor

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "reducescatter",
    "reducescatter_async",
]  # fmt: skip

_T = TypeVar("_T")
_Tensors: TypeAlias = Sequence[torch.Tensor]

_reduce_many, _reduce_in_place = partial(start.allreduce, grouped=True), partial(start.allreduce, in_place=True)
_gather_many, _scatter_many = partial(start.allgather, grouped=True), partial(start.reducescatter, grouped=True)
_copy_many, _copy_in_place = partial(start.broadcast, grouped=True), partial(start.broadcast, in_place=True)

# ---- gradients: of an operation's inputs, from those of its outputs --------------------------------------------------


class _Differentiable(Function):
    """An operation that waits, and the function of its gradients."""

    @staticmethod
    def forward(ctx: Any, begin: Any, gradients: Any, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.gradients, ctx.options = gradients, options
        ctx.rows = [one.shape[0] if one.dim() else 1 for one in tensors]
        found = synchronize(begin(tensors, *options))
        ctx.counts = found[1] if begin is start.alltoall else None
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *ctx.gradients(ctx, grads)


_apply: Any = _Differentiable.apply


def _of_allreduce(ctx: Any, grads: _Tensors) -> Any:
    average, _, *how = ctx.options
    return _apply(_reduce_many, _of_allreduce, (average, None, *how), *grads)


def _of_allgather(ctx: Any, grads: _Tensors) -> Any:
    _, process_set = ctx.options
    index = members_of(process_set)[1].index(world.current().rank)
    rows = torch.tensor(ctx.rows, device="cpu")
    every = synchronize(start.allgather([rows], None, process_set)).view(-1, len(grads))
    reduced = synchronize(_reduce_many(grads, process_set=process_set))
    starts = every[:index].sum(0).tolist()
    return [grad[first : first + mine] for grad, first, mine in zip(reduced, starts, ctx.rows, strict=True)]


def _of_broadcast(ctx: Any, grads: _Tensors) -> Any:
    root, _, process_set = ctx.options
    reduced = synchronize(start.allreduce(grads, process_set=process_set))
    return (reduced if world.current().rank == root else reduced * 0,)


def _of_alltoall(ctx: Any, grads: _Tensors) -> Any:
    back, _ = synchronize(start.alltoall(grads[:1], ctx.counts, None, ctx.options[2]))
    missing = ctx.rows[0] - back.shape[0]  # rows that were sent to nobody
    return (torch.cat([back, back.new_zeros((missing, *back.shape[1:]))]) if missing else back,)


def _of_reducescatter(ctx: Any, grads: _Tensors) -> Any:
    _, op, process_set, pre, post = ctx.options
    factor = pre * post * (len(members_of(process_set)[1]) if op == Sum else 1)
    return synchronize(_gather_many([grad * factor for grad in grads] if factor != 1 else grads, None, process_set))


# ---- operations that wait --------------------------------------------------------------------------------------------


def _compressed(compression: type[Compressor], tensors: _Tensors, *how: Any) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    outs = _apply(*how, *[compressed for compressed, _ in pairs])
    return [compression.decompress(one, context) for one, (_, context) in zip(outs, pairs, strict=True)]


def _allreduce(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    options = None, name, resolve_op(op, average), prescale_factor, postscale_factor, process_set
    return _compressed(compression, tensors, _reduce_many, _of_allreduce, options)


def _allgather(tensors: _Tensors, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    return _apply(_gather_many, _of_allgather, (name, process_set), *tensors)


def _broadcast(
    tensors: _Tensors, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    return _apply(_copy_many, _of_broadcast, (root_rank, name, process_set), *tensors)


def _alltoall(
    tensors: _Tensors,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    found = _apply(start.alltoall, _of_alltoall, (splits, name, process_set), *tensors)
    return found[:1] if splits is None else [found]


def _reducescatter(
    tensors: _Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    options = name, op, process_set, prescale_factor, postscale_factor
    return _compressed(compression, tensors, _scatter_many, _of_reducescatter, options)


# ---- the table -------------------------------------------------------------------------------------------------------

#: Arguments of operations that each verb sets itself.
_FIXED = ("in_place", "grouped")

_ARGUMENTS = """

Args:
    tensor: equal in shape and dtype on all ranks.
    average: deprecated; use ``op``.
    name: pairs the operations of different ranks; without one they pair by the order of all calls.
    op: Average (default), Sum, Adasum, Min, Max or Product.
    prescale_factor: factor before the reduction.
    postscale_factor: factor after the reduction.
    process_set: the ranks that take part.
    deterministic: never fuse it with other tensors, which changes the order of sums in rings of 3 or more ranks.

Raises:
    ValueError: a wrong argument, or an operation of this name is pending.
    HorovodInternalError: the job is down.
"""


def _verb(name: str, run: Callable[..., Any], end: Callable[[Any], _T], text: str) -> Callable[..., _T]:
    """Return a verb: ``run`` with a list of tensors, then ``end`` with what that returns."""

    def of_one(tensor: torch.Tensor, *args: Any, **given: Any) -> _T:
        return end(run([tensor], *args, **given))

    def of_many(tensors: _Tensors, *args: Any, **given: Any) -> _T:
        return end(run(list(tensors), *args, **given))

    verb: Any = of_many if name.startswith("grouped_") else of_one
    first, *_ = inspect.signature(verb, eval_str=True).parameters.values()
    _, *others = inspect.signature(run, eval_str=True).parameters.values()
    verb.__signature__ = inspect.Signature([first, *(one for one in others if one.name not in _FIXED)])
    verb.__name__, verb.__qualname__, verb.__doc__ = name, name, text
    return verb  # type: ignore[no-any-return]


_first: Callable[[Any], torch.Tensor] = itemgetter(0)

# fmt: off
allreduce_async = _verb("allreduce_async", start.allreduce, int,
    f"Reduce a tensor over all ranks into a new tensor; returns a handle.{_ARGUMENTS}")
allreduce_async_ = _verb("allreduce_async_", _reduce_in_place, int,
    "Reduce a contiguous tensor in place; returns a handle. See :func:`allreduce_async`.")
grouped_allreduce_async = _verb("grouped_allreduce_async", _reduce_many, int,
    "Reduce tensors that belong together, when all of them are ready on all ranks; returns one handle.")
grouped_allreduce_async_ = _verb("grouped_allreduce_async_", partial(_reduce_many, in_place=True), int,
    "Reduce tensors that belong together in place; returns one handle.")
allreduce = _verb("allreduce", _allreduce, _first,
    "Return the reduction of a tensor over all ranks; see :func:`allreduce_async`. Its gradient is reduced, too.")
allreduce_ = _verb("allreduce_", _reduce_in_place, synchronize, "Reduce a contiguous tensor in place; returns it.")
grouped_allreduce = _verb("grouped_allreduce", _allreduce, list,
    "Return the reductions of tensors that belong together. Differentiable.")
grouped_allreduce_ = _verb("grouped_allreduce_", partial(_reduce_many, in_place=True), synchronize,
    "Reduce tensors that belong together in place; returns them.")

allgather_async = _verb("allgather_async", start.allgather, int,
    "Concatenate all ranks' tensors along the first dimension, which may differ; returns a handle.")
grouped_allgather_async = _verb("grouped_allgather_async", _gather_many, int,
    "Gather tensors that belong together; returns one handle.")
allgather = _verb("allgather", _allgather, _first,
    "Return all ranks' tensors, concatenated along the first dimension. Differentiable.")
grouped_allgather = _verb("grouped_allgather", _allgather, list,
    "Gather tensors that belong together. Differentiable.")

broadcast_async = _verb("broadcast_async", start.broadcast, int,
    "Copy the tensor of ``root_rank`` (counted in the whole job) into a new tensor; returns a handle.")
broadcast_async_ = _verb("broadcast_async_", _copy_in_place, int,
    "Overwrite a tensor with that of ``root_rank``; returns a handle.")
broadcast = _verb("broadcast", _broadcast, _first,
    "Return a new tensor with the content of that of ``root_rank``. Differentiable.")
broadcast_ = _verb("broadcast_", _copy_in_place, synchronize,
    "Overwrite a tensor with that of ``root_rank``; returns it.")

alltoall_async = _verb("alltoall_async", start.alltoall, int,
    "Send ``splits`` rows of a tensor to each member, or equally many; the handle's result is (received rows, splits).")
alltoall = _verb("alltoall", _alltoall, itemgetter(0),
    "Return the rows that all members sent here; with ``splits`` also how many from each. Differentiable.")

reducescatter_async = _verb("reducescatter_async", start.reducescatter, int,
    "Reduce a tensor, of which each rank gets its rows; the first get one more where it does not come out.")
grouped_reducescatter_async = _verb("grouped_reducescatter_async", _scatter_many, int,
    "Reduce and scatter tensors that belong together; returns one handle.")
reducescatter = _verb("reducescatter", _reducescatter, _first,
    "Return this rank's rows of the reduction. Differentiable.")
grouped_reducescatter = _verb("grouped_reducescatter", _reducescatter, list,
    "Reduce and scatter tensors that belong together. Differentiable.")
# fmt: on
