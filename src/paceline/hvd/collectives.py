"""The asynchronous operations, and those in place. Each makes a request, and an operation that the background runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.hvd import world
from paceline.hvd.errors import HorovodInternalError
from paceline.hvd.execute import Operation
from paceline.hvd.negotiation.messages import Request
from paceline.hvd.process_sets import ProcessSet, global_process_set, members_of
from paceline.hvd.starting import (
    INTEGERS,
    Average,
    Sum,
    all_outputs,
    check_in_place,
    check_tensors,
    first_output,
    resolve_op,
    start,
    start_reduction,
)

# ---- allreduce -------------------------------------------------------------------------------------------------------


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor over all ranks into a new tensor; returns a handle.

    Args:
        tensor: alike in shape and dtype on all ranks.
        average: deprecated; use ``op``.
        name: pairs the operations of different ranks; without one they pair by the order of all calls.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        process_set: the ranks that take part.

    Raises:
        ValueError: a wrong argument, or an operation of this name is pending.
        HorovodInternalError: the job is down.
    """
    return start_reduction(
        [tensor], name, average, op, (prescale_factor, postscale_factor), process_set, first_output, False
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    deterministic: bool = False,
) -> int:
    """Reduce a tensor in place; see :func:`allreduce_async`.

    Args:
        tensor: contiguous.
        average: see :func:`allreduce_async`.
        name: see :func:`allreduce_async`.
        op: see :func:`allreduce_async`.
        prescale_factor: see :func:`allreduce_async`.
        postscale_factor: see :func:`allreduce_async`.
        process_set: see :func:`allreduce_async`.
        deterministic: never fuse it with other tensors, which changes the order of sums in rings of 3 or more ranks.
    """
    factors = prescale_factor, postscale_factor
    return start_reduction([tensor], name, average, op, factors, process_set, lambda _: tensor, True, deterministic)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors that belong together, when all of them are ready on all ranks; returns one handle."""
    return start_reduction(
        list(tensors), name, average, op, (prescale_factor, postscale_factor), process_set, all_outputs, False
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors that belong together in place; returns one handle."""
    given = list(tensors)
    return start_reduction(
        given, name, average, op, (prescale_factor, postscale_factor), process_set, lambda _: given, True
    )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Reduce a sparse COO tensor by gathering indices and values; returns a function that waits for the result."""
    number = resolve_op(op, None)
    if number not in (Average, Sum):
        raise ValueError("a sparse tensor can be averaged or summed")
    coalesced = tensor.detach().coalesce()
    prefix = None if name is None else f"{name}."
    indices = coalesced.indices().t().contiguous()
    rows = allgather_async(indices, None if prefix is None else prefix + "indices", process_set)
    values = allgather_async(coalesced.values(), None if prefix is None else prefix + "values", process_set)
    shape, size = tensor.shape, len(members_of(process_set)[1])

    def wait() -> torch.Tensor:
        found, content = synchronize(rows), synchronize(values)
        if number == Average:
            content = content / size
        return torch.sparse_coo_tensor(found.t(), content, shape, check_invariants=False)

    return wait


# ---- other operations ------------------------------------------------------------------------------------------------


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenate all ranks' tensors along the first dimension, which may differ; returns a handle."""
    return start("allgather", name, [tensor], process_set, first_output)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Gather tensors that belong together; returns one handle."""
    return start("allgather", name, list(tensors), process_set, all_outputs)


def _broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Operation], Any],
    in_place: bool,
) -> int:
    _, members = members_of(process_set)
    if root_rank not in members:
        raise ValueError(f"root rank {root_rank} is not in the process set of ranks {list(members)}")
    if in_place:
        check_in_place([tensor])
    return start("broadcast", name, [tensor], process_set, finish, [tensor] if in_place else None, root=int(root_rank))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Return a handle of a new tensor with the content of that of ``root_rank`` (counted in the whole job)."""
    return _broadcast(tensor, root_rank, name, process_set, first_output, False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Overwrite a tensor with that of ``root_rank``; returns a handle."""
    return _broadcast(tensor, root_rank, name, process_set, lambda _: tensor, True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows of a tensor to each member; the handle's result is (received rows, received splits).

    Args:
        tensor: at least one dimension.
        splits: rows for each member; None: equally many.
        name: see :func:`allreduce_async`.
        process_set: the ranks that take part.

    Raises:
        ValueError: the rows do not suffice, or cannot be divided equally.
    """
    _, members = members_of(process_set)
    check_tensors([tensor])
    if not tensor.dim():
        raise ValueError("alltoall of a tensor without dimensions")
    rows = tensor.shape[0]
    if splits is None:
        if rows % len(members):
            raise ValueError(f"{rows} rows cannot be divided equally among {len(members)} ranks; give splits")
        counts = [rows // len(members)] * len(members)
    else:
        if isinstance(splits, torch.Tensor) and splits.dtype not in INTEGERS:
            raise ValueError(f"splits must be integers, not {splits.dtype}")
        counts = [int(one) for one in splits]
        if len(counts) != len(members):
            raise ValueError(f"{len(counts)} splits for {len(members)} ranks")
        if min(counts) < 0 or sum(counts) > rows:
            raise ValueError(f"splits {counts} of a tensor of {rows} rows")
    return start("alltoall", name, [tensor], process_set, _received, splits=tuple(counts))


def _received(operation: Operation) -> tuple[torch.Tensor, torch.Tensor]:
    return first_output(operation), torch.tensor(operation.received_splits, dtype=torch.int32)


def _scatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    factors: tuple[float, float],
    finish: Callable[[Operation], Any],
) -> int:
    if op not in (Average, Sum):
        raise HorovodInternalError(f"reducescatter can average or sum (hvd.Average, hvd.Sum), and got op={op!r}")
    prescale, postscale = map(float, factors)
    return start("reducescatter", name, tensors, process_set, finish, op=op, prescale=prescale, postscale=postscale)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce a tensor, of which each rank gets its rows; the first ranks get one more where it does not come out.

    Raises:
        HorovodInternalError: an ``op`` that is neither Average nor Sum; as in Horovod.
    """
    return _scatter([tensor], name, op, process_set, (prescale_factor, postscale_factor), first_output)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce and scatter tensors that belong together; returns one handle."""
    return _scatter(list(tensors), name, op, process_set, (prescale_factor, postscale_factor), all_outputs)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have; returns the last rank to join.

    Until then this rank takes part in the others' operations: with zeros in reductions, without rows elsewhere.

    Args:
        device: not used.
    """
    running = world.running()
    return int(running.call(Request("join", "")))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called this."""
    set_id, _ = members_of(process_set)
    running = world.running()
    running.call(Request("barrier", "barrier.noname", set_id))


def poll(handle: int) -> bool:
    """Return whether :func:`synchronize` would not wait."""
    return world.running().handles.is_done(handle)


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle that is not known.

    Raises:
        HorovodInternalError: the operation failed.
    """
    return world.running().synchronize(handle)
