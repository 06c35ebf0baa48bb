"""Starts operations of this rank. Each makes a request, and an operation that the background runs.

The functions for tensors take a list of them, then Horovod's arguments in Horovod's order, and return a handle for
:func:`synchronize`. With ``grouped`` its result is a list. With ``in_place`` the tensors are overwritten. The names of
Horovod are in :mod:`paceline.hvd.verbs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.collectives import world
from paceline.collectives.errors import CollectiveError
from paceline.collectives.execute import Operation
from paceline.collectives.negotiation.messages import OperationRequest
from paceline.collectives.planes.base import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM
from paceline.collectives.process_sets import ProcessSet, global_process_set, members_of
from paceline.collectives.sparse import added
from paceline.worker import alone

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "barrier", "join", "poll", "sparse_allreduce_async",
    "synchronize",
]  # fmt: skip

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NAMES = {one: str(one).removeprefix("torch.") for one in (*_FLOATS, *_INTEGERS, torch.bool)}


# ---- checks


def _dtype_name(tensor: torch.Tensor, with_bool: bool) -> str:
    name = _NAMES.get(tensor.dtype)
    if name is None or (name == "bool" and not with_bool):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    return name


def _check_tensors(tensors: Sequence[Any]) -> None:
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"an operation takes tensors, not {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ValueError("a sparse tensor; use sparse_allreduce_async")
        if tensor.is_meta:
            raise ValueError("a tensor of the device meta, which has no values")
    if len(tensors) > 1 and len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("all tensors of a group must be on one device")


def resolve_op(op: int | None, average: bool | None) -> int:
    """Return the operation that the arguments ask for.

    Raises:
        ValueError: both are given, or there is no such operation.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed", DeprecationWarning, stacklevel=4
        )
        return Average if average else Sum
    op = Average if op is None else op
    if op not in (Average, Sum, Adasum, Min, Max, Product):
        raise ValueError(f"op={op!r} is no operation; use hvd.Average, Sum, Adasum, Min, Max or Product")
    return int(op)


def _check_adasum(tensors: Sequence[torch.Tensor], process_set: ProcessSet, size: int) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets.")
    if size & (size - 1):
        raise NotImplementedError(f"Running Adasum with {size} ranks: it needs a power of 2.")
    if not all(tensor.dtype in _FLOATS for tensor in tensors):
        raise ValueError("Adasum needs floating point tensors")


# ---- starting


def _start(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    in_place: bool = False,
    grouped: bool = False,
    **fields: Any,
) -> int:
    """Start an operation; returns its handle."""
    running = world.current()
    set_id, _ = members_of(process_set)
    if kind != "broadcast":  # which brings weights, no gradients
        alone.note_exchange()
    if name is None:
        name = f"noname.{running.background.number(set_id)}"
        fields["cached"] = False
    _check_tensors(tensors)
    if in_place and not all(one.is_contiguous() for one in tensors):
        raise ValueError("an operation in place needs contiguous tensors")
    with_bool = kind not in ("allreduce", "reducescatter")
    if len(tensors) == 1:  # thousands of them may start in a step
        dtypes: tuple[str, ...] = (_dtype_name(tensors[0], with_bool),)
        shapes: tuple[tuple[int, ...], ...] = (tuple(tensors[0].shape),)
    else:
        dtypes = tuple([_dtype_name(one, with_bool) for one in tensors])
        shapes = tuple([tuple(one.shape) for one in tensors])
    first = tensors[0]
    request = OperationRequest(
        kind, name, set_id, dtypes, shapes, "cpu" if first.is_cpu else first.device.type, **fields
    )
    # Operations in place need contiguous tensors, so these are their outputs, too.
    mine = [(one.detach() if one.requires_grad else one).contiguous() for one in tensors]
    operation = Operation(request, mine, mine if in_place else None, tensors if in_place else None, grouped)
    if first.is_cuda:
        operation.ready = torch.cuda.current_stream(first.device).record_event()
        running.background.gpu = first.device
    return running.background.start(operation)


# ---- operations ------------------------------------------------------------------------------------------------------


def allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool = False,
    grouped: bool = False,
    deterministic: bool = False,
) -> int:
    """Reduce tensors that belong together over all ranks, when all of them are ready there.

    Args:
        tensors: equal in shape and dtype on all ranks.
        average: deprecated; use ``op``.
        name: pairs the operations of different ranks; without one they pair by the order of all calls.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        process_set: the ranks that take part.
        in_place: overwrite the tensors, which are contiguous.
        grouped: the result is a list.
        deterministic: never fuse them with other tensors, which changes the order of sums in rings of 3 or more ranks.

    Raises:
        ValueError: a wrong argument, or an operation of this name is pending.
        CollectiveError: the job is down.
    """
    number = resolve_op(op, average)
    if number == Adasum:
        _check_tensors(tensors)
        _check_adasum(tensors, process_set, world.current().size)
    return _start(
        "allreduce", name, tensors, process_set, in_place, grouped,
        op=number, prescale=float(prescale_factor), postscale=float(postscale_factor), alone=deterministic,
    )  # fmt: skip


def allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    grouped: bool = False,
) -> int:
    """Concatenate all ranks' tensors along the first dimension, which may differ."""
    return _start("allgather", name, tensors, process_set, grouped=grouped)


def broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool = False,
    grouped: bool = False,
) -> int:
    """Copy the tensors of ``root_rank``, which is counted in the whole job, to all ranks."""
    members_of(process_set, root_rank)
    return _start("broadcast", name, tensors, process_set, in_place, grouped, root=int(root_rank))


def alltoall(
    tensors: Sequence[torch.Tensor],
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows of a tensor to each member; the handle's result is (received rows, received splits).

    Args:
        tensors: one tensor with at least one dimension.
        splits: rows for each member; None: equally many.
        name: see :func:`allreduce`.
        process_set: the ranks that take part.

    Raises:
        ValueError: the rows do not suffice, or cannot be divided equally.
    """
    _, members = members_of(process_set)
    _check_tensors(tensors)
    if not tensors[0].dim():
        raise ValueError("alltoall of a tensor without dimensions")
    rows = tensors[0].shape[0]
    if splits is None:
        if rows % len(members):
            raise ValueError(f"{rows} rows cannot be divided equally among {len(members)} ranks; give splits")
        counts = [rows // len(members)] * len(members)
    else:
        if isinstance(splits, torch.Tensor) and splits.dtype not in _INTEGERS:
            raise ValueError(f"splits must be integers, not {splits.dtype}")
        counts = [int(one) for one in splits]
        if len(counts) != len(members):
            raise ValueError(f"{len(counts)} splits for {len(members)} ranks")
        if min(counts) < 0 or sum(counts) > rows:
            raise ValueError(f"splits {counts} of a tensor of {rows} rows")
    return _start("alltoall", name, tensors, process_set, splits=tuple(counts))


def reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    grouped: bool = False,
) -> int:
    """Reduce tensors, of which each rank gets its rows; the first ranks get one more where it does not come out.

    Raises:
        CollectiveError: an ``op`` that is neither Average nor Sum; as in Horovod.
    """
    if op not in (Average, Sum):
        raise CollectiveError(f"reducescatter can average or sum (hvd.Average, hvd.Sum), and got op={op!r}")
    return _start(
        "reducescatter", name, tensors, process_set, False, grouped,
        op=op, prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Reduce a sparse COO tensor by gathering indices and values; returns a function that waits for the result.

    The function raises a ``ProtocolError`` for indices of another rank that this rank's tensor does not have.
    """
    number = resolve_op(op, None)
    if number not in (Average, Sum):
        raise ValueError("a sparse tensor can be averaged or summed")
    coalesced = tensor.detach().coalesce()
    entries, shape = [coalesced.indices().t().contiguous(), coalesced.values()], tuple(tensor.shape)
    handle = _start("allgather", name and f"{name}.entries", entries, process_set, grouped=True, sparse_shape=shape)
    (_, members), rank = members_of(process_set), world.current().rank

    def wait() -> torch.Tensor:
        (found, content), (counts, _) = synchronize(handle)
        content = content / len(members) if number == Average else content
        return added(found, content, counts, shape, members, rank)

    return wait


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have; returns the last rank to join.

    Until then this rank takes part in the others' operations: with zeros in reductions, without rows elsewhere.

    Args:
        device: number of the GPU for these, of a rank that has given no tensor of a GPU yet; by default the current.
    """
    running = world.current()
    background = running.background
    if background.gpu is None and (device >= 0 or torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        background.gpu = torch.device("cuda", device if device >= 0 else torch.cuda.current_device())
    last = int(background.call(OperationRequest("join", "")))
    running.note_join()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called this."""
    set_id, _ = members_of(process_set)
    world.current().background.call(OperationRequest("barrier", "barrier.noname", set_id))


def poll(handle: int) -> bool:
    """Return whether :func:`synchronize` would not wait."""
    return world.current().background.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle that is not known.

    Raises:
        CollectiveError: the operation failed.
    """
    return world.current().background.synchronize(handle)
