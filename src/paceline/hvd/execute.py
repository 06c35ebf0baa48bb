"""Runs negotiated operations on a plane: packs, scales, moves and unpacks tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.hvd.errors import HorovodInternalError
from paceline.hvd.negotiation import Request, Response
from paceline.hvd.operation import Operation
from paceline.hvd.planes.adasum import adasum
from paceline.hvd.planes.base import ADASUM, Plane, Reduction

#: Tensors of more bytes are not packed: a copy would cost more than an operation of their own.
PACK_BYTES = 512 * 1024


@dataclass(slots=True)
class Task:
    """An operation to run: what was negotiated, this rank's part (None if it has joined), and the process set."""

    response: Response
    own: Operation | None
    members: tuple[int, ...]

    @property
    def request(self) -> Request:
        """What all ranks have in common."""
        return self.response.request


def run(tasks: Sequence[Task], plane: Plane) -> None:
    """Run tasks that were fused, or a single one, and set their outputs.

    Raises:
        HorovodInternalError: data could not be moved.
    """
    for task in tasks:
        if task.own is not None and task.own.ready is not None:
            task.own.ready.synchronize()
    with torch.no_grad():
        _RUNNERS[tasks[0].request.kind](tasks, plane)
    if tasks[0].request.device == "cuda":
        torch.cuda.synchronize()


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name in requests.

    Raises:
        HorovodInternalError: no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise HorovodInternalError(f"{name!r} is no element type")
    return found


def _tensors(task: Task) -> list[torch.Tensor]:
    """Return this rank's tensors; zeros if it has joined."""
    if task.own is not None:
        return task.own.tensors
    pairs = zip(task.request.dtypes, task.request.shapes, strict=True)
    device = task.request.device
    return [torch.zeros(shape, dtype=dtype_of(dtype), device=device) for dtype, shape in pairs]


def _empty_like_rest(task: Task, number: int, rows: int) -> torch.Tensor:
    """Return a new tensor with another first dimension."""
    if task.own is not None:
        tensor = task.own.tensors[number]
        return tensor.new_empty((rows, *tensor.shape[1:]))
    shape = task.request.shapes[number][1:]
    return torch.empty((rows, *shape), dtype=dtype_of(task.request.dtypes[number]), device=task.request.device)


def _allreduce(tasks: Sequence[Task], plane: Plane) -> None:
    request = tasks[0].request
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for task in tasks:
        mine = _tensors(task)
        sources += mine
        if task.own is None:
            targets += mine
            continue
        if task.own.outputs is None:
            task.own.outputs = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in mine]
        targets += task.own.outputs
    if request.op == ADASUM:
        for source, target in zip(sources, targets, strict=True):
            _adasum(source, target, request, plane)
        return
    packs: dict[torch.dtype, list[int]] = {}
    for number, source in enumerate(sources):
        if source.numel() * source.element_size() > PACK_BYTES or request.alone:
            how = Reduction(request.op, source.dtype, plane.size, request.prescale, request.postscale)
            plane.allreduce(source.view(-1), targets[number].view(-1), how)
        else:
            packs.setdefault(source.dtype, []).append(number)
    for dtype, numbers in packs.items():
        how = Reduction(request.op, dtype, plane.size, request.prescale, request.postscale)
        _allreduce_packed([sources[one] for one in numbers], [targets[one] for one in numbers], how, plane)


def _allreduce_packed(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], how: Reduction, plane: Plane
) -> None:
    if len(sources) == 1:
        plane.allreduce(sources[0].view(-1), targets[0].view(-1), how)
        return
    flat = torch.cat([source if source.dim() == 1 else source.view(-1) for source in sources])
    plane.allreduce(flat, flat, how)
    parts = torch.split_with_sizes(flat, [source.numel() for source in sources])
    torch._foreach_copy_([target if target.dim() == 1 else target.view(-1) for target in targets], list(parts))


def _adasum(source: torch.Tensor, target: torch.Tensor, request: Request, plane: Plane) -> None:
    gathered = source.new_empty(plane.size * source.numel())
    scaled = source if request.prescale == 1.0 else source * request.prescale
    plane.allgather(scaled.reshape(-1), gathered, [source.numel()] * plane.size)
    parts = list(gathered.view(plane.size, -1).unbind()) if source.numel() else [gathered]
    target.view(-1).copy_(adasum(parts).mul_(request.postscale))


def _allgather(tasks: Sequence[Task], plane: Plane) -> None:
    [task] = tasks
    outputs = []
    for number, dims in enumerate(task.response.dims):
        output = _empty_like_rest(task, number, sum(dims))
        row = math.prod(output.shape[1:])
        source = task.own.tensors[number].view(-1) if task.own is not None else output.new_empty(0)
        if output.numel():
            plane.allgather(source, output.view(-1), [rows * row for rows in dims])
        outputs.append(output)
    _set_outputs(task, outputs)


def _broadcast(tasks: Sequence[Task], plane: Plane) -> None:
    [task] = tasks
    outputs = []
    root = task.members.index(task.request.root)
    for number, source in enumerate(_tensors(task)):
        given = task.own.outputs if task.own is not None else None
        output = source if task.own is None else torch.empty_like(source) if given is None else given[number]
        if plane.index == root and output is not source:
            output.copy_(source)
        if output.numel():
            plane.broadcast(output.view(-1), root)
        outputs.append(output)
    _set_outputs(task, outputs)


def _alltoall(tasks: Sequence[Task], plane: Plane) -> None:
    [task] = tasks
    splits = task.response.splits
    received = [row[plane.index] for row in splits]
    output = _empty_like_rest(task, 0, sum(received))
    row = math.prod(output.shape[1:])
    counts = [[rows * row for rows in one] for one in splits]
    source = task.own.tensors[0].view(-1) if task.own is not None else output.new_empty(0)
    if any(map(any, counts)):
        plane.alltoall(source, output.view(-1), counts)
    if task.own is not None:
        task.own.received_splits = received
    _set_outputs(task, [output])


def shares(rows: int, size: int) -> list[int]:
    """Return the rows of each member in a reducescatter; the first ones get one more where it does not come out."""
    return [rows // size + (one < rows % size) for one in range(size)]


def _reducescatter(tasks: Sequence[Task], plane: Plane) -> None:
    [task] = tasks
    request, outputs = task.request, []
    for number, source in enumerate(_tensors(task)):
        rows = shares(source.shape[0], plane.size)
        output = _empty_like_rest(task, number, rows[plane.index])
        row = math.prod(source.shape[1:])
        how = Reduction(request.op, source.dtype, plane.size, request.prescale, request.postscale)
        if source.numel():
            plane.reducescatter(source.view(-1), output.view(-1), [one * row for one in rows], how)
        outputs.append(output)
    _set_outputs(task, outputs)


def _barrier(tasks: Sequence[Task], plane: Plane) -> None:
    """Do nothing: negotiation has waited for all."""


def _set_outputs(task: Task, outputs: list[torch.Tensor]) -> None:
    if task.own is not None:
        task.own.outputs = outputs


_RUNNERS: dict[str, Callable[[Sequence[Task], Plane], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
}
