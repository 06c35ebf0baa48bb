"""Operations of this rank: which of a batch run as one, and how they run on a plane.

All members of a process set come to the same groups.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from paceline.collectives.errors import CollectiveError
from paceline.collectives.negotiation.machine import ProcessSets
from paceline.collectives.negotiation.messages import UNLIKE, Batch, Key, OperationRequest, Response
from paceline.collectives.planes.base import ADASUM, Plane, Reduction, Staged, adasum
from paceline.layout.tensors import copy_stream

_MOST_PLANS = 64
#: Tensors of more bytes are not packed: a copy would cost more than an operation of their own.
PACK_BYTES = 512 * 1024


@dataclass(slots=True)
class Operation:
    """A pending or finished operation.

    Attributes:
        outputs: tensors for results; None: new tensors.
        given: tensors of the caller that are the result of an operation in place; None: ``outputs`` are.
        grouped: the result is a list of tensors.
        result: the result of an operation without tensors.
        received: rows received from each member, of each tensor (allgather, alltoall).
        ready: event of their GPU after which ``tensors`` are complete.
    """

    request: OperationRequest
    tensors: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] | None = None
    given: Sequence[torch.Tensor] | None = None
    grouped: bool = False
    result: Any = None
    error: str = ""
    done: bool = False
    received: Sequence[Sequence[int]] = ()
    ready: torch.cuda.Event | None = None

    def outcome(self) -> Any:
        """Return the result of a finished operation, in the thread that uses it.

        Raises:
            CollectiveError: it failed.
        """
        if self.error:
            raise CollectiveError(self.error)
        if not self.tensors:
            return self.result
        found = self.outputs if self.given is None else self.given
        assert found is not None
        if self.ready is not None and self.given is None:  # it was made on the stream for copies
            for one in found:
                one.record_stream(torch.cuda.current_stream(one.device))
        if self.request.kind == "alltoall":
            return found[0], torch.tensor(self.received[0], dtype=torch.int32, device="cpu")
        if self.request.sparse_shape:
            return found, self.received
        return found if self.grouped else found[0]


# ---- which operations run as one -------------------------------------------------------------------------------------


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name in requests.

    Raises:
        CollectiveError: no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CollectiveError(f"{name!r} is no element type")
    return found


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of this dtype and shape."""
    return math.prod(shape) * dtype_of(dtype).itemsize


def fuse(responses: Sequence[Response], threshold: int) -> list[list[Response]]:
    """Arrange the responses of a batch in groups that run as one operation, in order.

    Allreduces of one process set, device, dtype, operation and pair of factors are packed until they have
    ``threshold`` bytes (0: not at all). A group takes the place of its first member.
    """
    groups: list[list[Response]] = []
    open_groups: dict[object, tuple[list[Response], int]] = {}
    for response in responses:
        request = response.request
        if not threshold or request.kind != "allreduce" or request.alone or len({*request.dtypes}) != 1:
            groups.append([response])
            continue
        alike = (
            request.process_set, request.device, request.dtypes[0], request.op, request.prescale, request.postscale
        )  # fmt: skip
        size = sum(map(tensor_bytes, request.dtypes, request.shapes))
        group, room = open_groups.get(alike, ([], -1))
        if size > room:
            group, room = [], threshold
            groups.append(group)
        group.append(response)
        open_groups[alike] = group, room - size
    return groups


@dataclass(frozen=True, slots=True)
class FusedOperations:
    """Operations that run as one, with facts from their requests: worked out once where they are cached.

    Attributes:
        responses: the negotiated operations; several only for allreduce.
        whole: numbers of the tensors that are reduced by themselves (allreduce).
        packs: for each dtype, the numbers of the tensors that are reduced as one (allreduce).
    """

    responses: tuple[Response, ...]
    members: tuple[int, ...]
    keys: tuple[Key, ...]
    whole: tuple[int, ...]
    packs: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def request(self) -> OperationRequest:
        """The common data of all requests."""
        return self.responses[0].request


def group_of(responses: Sequence[Response], members: tuple[int, ...]) -> FusedOperations:
    """Return the group of responses that were fused, or of a single one."""
    requests = [response.request for response in responses]
    keys = tuple([request.key for request in requests])
    whole: list[int] = []
    packs: dict[str, list[int]] = {}
    if requests[0].kind == "allreduce":
        pairs = [pair for one in requests for pair in zip(one.dtypes, one.shapes, strict=True)]
        for number, (dtype, shape) in enumerate(pairs):
            if requests[0].alone or tensor_bytes(dtype, shape) > PACK_BYTES:
                whole.append(number)
            else:
                packs.setdefault(dtype, []).append(number)
    packed = tuple([(dtype, tuple(numbers)) for dtype, numbers in packs.items()])
    return FusedOperations(tuple(responses), members, keys, tuple(whole), packed)


@dataclass(frozen=True)
class BatchPlan:
    """A batch of cached operations: the keys of all of them, and the groups of those that this rank is in."""

    keys: Sequence[Key]
    groups: Sequence[FusedOperations]


class BatchPlans:
    """How this rank runs the operations of batches; the same bits mean the same until the response cache changes."""

    def __init__(self, rank: int, sets: ProcessSets, fusion_bytes: int) -> None:
        self._rank, self._sets, self._fusion_bytes = rank, sets, fusion_bytes
        self._plans: dict[bytes, BatchPlan] = {}

    def known(self, batch: Batch) -> BatchPlan | None:
        """Return the plan of a batch of nothing but bits that ran before; None: it is not known."""
        if batch.responses or batch.forgotten:
            self._plans.clear()
        return self._plans.get(batch.bits)

    def make(self, batch: Batch, cached: Sequence[Response]) -> BatchPlan:
        """Return the plan of a batch's cached operations."""
        plan = BatchPlan([response.request.key for response in cached], self.groups(cached))
        if batch.bits and not batch.forgotten:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[batch.bits] = plan
        return plan

    def groups(self, responses: Sequence[Response]) -> list[FusedOperations]:
        """Return the groups that run as one, of the process sets that this rank is in."""
        members = self._sets.members
        mine = [one for one in responses if self._rank in members(one.request.process_set)]
        fused = fuse(mine, self._fusion_bytes)
        return [group_of(one, members(one[0].request.process_set)) for one in fused]


# ---- running ---------------------------------------------------------------------------------------------------------


def on_gpu_of(
    group: FusedOperations, owns: Sequence[Operation | None], gpu: torch.device | None
) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the GPU of this rank's tensors is the current one of the thread.

    Its stream is one of its own there: that of the script has kernels which it began later, as the rest of backward.
    """
    if group.request.device not in ("cuda", UNLIKE):
        return contextlib.nullcontext()
    found = (one.device for own in owns if own is not None for one in own.tensors if one.is_cuda)
    device = next(found, gpu if group.request.device == "cuda" else None)
    return contextlib.nullcontext() if device is None else torch.cuda.stream(copy_stream(device))


def run(group: FusedOperations, owns: Sequence[Operation | None], plane: Plane) -> None:
    """Run operations and set their outputs. The part of a rank that has joined is None.

    Raises:
        CollectiveError: data could not be moved.
    """
    begun = [own.ready for own in owns if own is not None and own.ready is not None]
    for one in begun:
        one.synchronize()
    parts = [
        _part_of_joined(response.request, plane) if own is None else own
        for response, own in zip(group.responses, owns, strict=True)
    ]
    with torch.no_grad():
        if group.request.kind == "allreduce":
            _allreduce(group, parts, plane)
        elif group.request.kind != "barrier":  # of that, negotiation is all
            parts[0].outputs = _RUNNERS[group.request.kind](group, parts[0], plane)
    if begun or (group.request.device == "cuda" and not isinstance(plane, Staged)):  # a rank that joined may lack one
        torch.cuda.current_stream().synchronize()


def _part_of_joined(request: OperationRequest, plane: Plane) -> Operation:
    """Return the part of a rank that has joined: zeros in reductions, no rows elsewhere.

    The rank may lack the device of the others, where tensors meet in host memory.
    """
    device = "cpu" if isinstance(plane, Staged) else request.device
    shapes = request.shapes
    if request.kind in ("allgather", "alltoall"):
        shapes = tuple((0, *shape[1:]) for shape in shapes)
    pairs = zip(request.dtypes, shapes, strict=True)
    zeros = [torch.zeros(shape, dtype=dtype_of(dtype), device=device) for dtype, shape in pairs]
    return Operation(request, zeros, zeros)


def _empty_rows(like: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a new tensor with another first dimension."""
    return like.new_empty((rows, *like.shape[1:]))


def _allreduce(group: FusedOperations, owns: Sequence[Operation], plane: Plane) -> None:
    request = group.request
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for own in owns:
        if own.outputs is None:
            own.outputs = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in own.tensors]
        sources += own.tensors
        targets += own.outputs
    if request.op == ADASUM:
        for source, target in zip(sources, targets, strict=True):
            _adasum(source, target, request, plane)
        return
    for number in group.whole:
        source = sources[number]
        how = Reduction(request.op, source.dtype, plane.size, request.prescale, request.postscale)
        plane.allreduce(source.view(-1), targets[number].view(-1), how)
    for dtype, numbers in group.packs:
        how = Reduction(request.op, dtype_of(dtype), plane.size, request.prescale, request.postscale)
        _allreduce_packed([sources[one] for one in numbers], [targets[one] for one in numbers], how, plane)


def _allreduce_packed(sources: list[torch.Tensor], targets: list[torch.Tensor], how: Reduction, plane: Plane) -> None:
    if len(sources) == 1:
        plane.allreduce(sources[0].view(-1), targets[0].view(-1), how)
        return
    flat: torch.Tensor = _flatten_dense_tensors(sources)  # type: ignore[no-untyped-call]
    plane.allreduce(flat, flat, how)
    parts: list[torch.Tensor] = _unflatten_dense_tensors(flat, targets)  # type: ignore[no-untyped-call]
    torch._foreach_copy_(targets, parts)


def _adasum(source: torch.Tensor, target: torch.Tensor, request: OperationRequest, plane: Plane) -> None:
    gathered = source.new_empty(plane.size * source.numel())
    scaled = source if request.prescale == 1.0 else source * request.prescale
    plane.allgather(scaled.reshape(-1), gathered, [source.numel()] * plane.size)
    parts = list(gathered.view(plane.size, -1).unbind()) if source.numel() else [gathered]
    target.view(-1).copy_(adasum(parts).mul_(request.postscale))


def _allgather(group: FusedOperations, own: Operation, plane: Plane) -> list[torch.Tensor]:
    outputs, own.received = [], group.responses[0].dims
    for source, dims in zip(own.tensors, own.received, strict=True):
        output = _empty_rows(source, sum(dims))
        row = math.prod(output.shape[1:])
        if output.numel():
            plane.allgather(source.view(-1), output.view(-1), [rows * row for rows in dims])
        outputs.append(output)
    return outputs


def _broadcast(group: FusedOperations, own: Operation, plane: Plane) -> list[torch.Tensor]:
    outputs = []
    root = group.members.index(group.request.root)
    for number, source in enumerate(own.tensors):
        output = torch.empty_like(source) if own.outputs is None else own.outputs[number]
        if plane.index == root and output is not source:
            output.copy_(source)
        if output.numel():
            plane.broadcast(output.view(-1), root)
        outputs.append(output)
    return outputs


def _alltoall(group: FusedOperations, own: Operation, plane: Plane) -> list[torch.Tensor]:
    splits = group.responses[0].splits
    received = [row[plane.index] for row in splits]
    own.received = [received]
    output = _empty_rows(own.tensors[0], sum(received))
    row = math.prod(output.shape[1:])
    counts = [[rows * row for rows in one] for one in splits]
    if any(map(any, counts)):
        plane.alltoall(own.tensors[0].view(-1), output.view(-1), counts)
    return [output]


def shares(rows: int, size: int) -> list[int]:
    """Divide rows, as among the members in a reducescatter; the first get one more where it does not come out."""
    return [rows // size + (one < rows % size) for one in range(size)]


def _reducescatter(group: FusedOperations, own: Operation, plane: Plane) -> list[torch.Tensor]:
    request, outputs = group.request, []
    for source in own.tensors:
        rows = shares(source.shape[0], plane.size)
        output = _empty_rows(source, rows[plane.index])
        row = math.prod(source.shape[1:])
        how = Reduction(request.op, source.dtype, plane.size, request.prescale, request.postscale)
        if source.numel():
            plane.reducescatter(source.view(-1), output.view(-1), [one * row for one in rows], how)
        outputs.append(output)
    return outputs


_RUNNERS: dict[str, Callable[[FusedOperations, Operation, Plane], list[torch.Tensor]]] = {
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
