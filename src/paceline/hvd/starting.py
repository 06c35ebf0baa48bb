"""Checks the arguments of operations, and starts them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.hvd import world
from paceline.hvd.execute import Operation
from paceline.hvd.negotiation.messages import Request
from paceline.hvd.planes.base import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM
from paceline.hvd.process_sets import ProcessSet, global_process_set, members_of

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NAMES = {one: str(one).removeprefix("torch.") for one in (*_FLOATS, *INTEGERS, torch.bool)}


# ---- checks ----------------------------------------------------------------------------------------------------------


def _dtype_name(tensor: torch.Tensor, with_bool: bool) -> str:
    name = _NAMES.get(tensor.dtype)
    if name is None or (name == "bool" and not with_bool):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    return name


def check_tensors(tensors: Sequence[Any]) -> None:
    """Check that tensors can be one operation.

    Raises:
        ValueError: no tensors, sparse ones, or of several devices.
    """
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"an operation takes tensors, not {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ValueError("a sparse tensor; use sparse_allreduce_async")
    if len(tensors) > 1 and len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("all tensors of a group must be on one device")


def check_in_place(tensors: Sequence[torch.Tensor]) -> None:
    """Check that tensors can be overwritten.

    Raises:
        ValueError: one is not contiguous.
    """
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError("an operation in place needs contiguous tensors")


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


# ---- starting --------------------------------------------------------------------------------------------------------


def start(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    finish: Callable[[Operation], Any],
    outputs: Sequence[torch.Tensor] | None = None,
    **fields: Any,
) -> int:
    """Start an operation; returns its handle."""
    running = world.running()
    set_id, _ = members_of(process_set)
    if name is None:
        name = f"noname.{running.handles.number(set_id)}"
        fields["cached"] = False
    check_tensors(tensors)
    with_bool = kind not in ("allreduce", "reducescatter")
    if len(tensors) == 1:  # thousands of them may start in a step
        dtypes: tuple[str, ...] = (_dtype_name(tensors[0], with_bool),)
        shapes: tuple[tuple[int, ...], ...] = (tuple(tensors[0].shape),)
    else:
        dtypes = tuple([_dtype_name(one, with_bool) for one in tensors])
        shapes = tuple([tuple(one.shape) for one in tensors])
    first = tensors[0]
    is_cuda = first.is_cuda
    request = Request(kind, name, set_id, dtypes, shapes, "cpu" if first.is_cpu else first.device.type, **fields)
    # Operations in place need contiguous tensors, so these are their outputs, too.
    mine = [(one.detach() if one.requires_grad else one).contiguous() for one in tensors]
    results = None if outputs is None else mine
    operation = Operation(request, mine, results, finish)
    if is_cuda:
        operation.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        operation.ready.record()
    return running.start(running.handles.count(), operation)


def first_output(operation: Operation) -> torch.Tensor:
    """Return the only result."""
    assert operation.outputs is not None
    return operation.outputs[0]


def all_outputs(operation: Operation) -> list[torch.Tensor]:
    """Return the results of a group."""
    assert operation.outputs is not None
    return operation.outputs


def start_reduction(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    average: bool | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    finish: Callable[[Operation], Any],
    in_place: bool,
    alone: bool = False,
) -> int:
    """Start an allreduce; returns its handle. See :func:`paceline.hvd.allreduce_async`."""
    number = resolve_op(op, average)
    if number == Adasum:
        check_tensors(tensors)
        _check_adasum(tensors, process_set, world.running().size)
    if in_place:
        check_in_place(tensors)
    return start(
        "allreduce",
        name,
        tensors,
        process_set,
        finish,
        tensors if in_place else None,
        op=number,
        prescale=float(factors[0]),
        postscale=float(factors[1]),
        alone=alone,
    )
