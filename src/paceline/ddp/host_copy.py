"""Tensors of a process group in host memory, and the arguments of torch.distributed about them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import distributed as dist

from paceline.collectives.planes.base import AVERAGE, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, Plane, Reduction
from paceline.collectives.sparse import added, check_counts
from paceline.config import variable
from paceline.errors import PacelineError
from paceline.layout.tensors import copy_stream, host_buffer, real_view, to_host

#: Its members are missing in PyTorch's stubs.
RED_OPS: Any = dist.ReduceOp.RedOpType

Tensors: TypeAlias = Sequence[torch.Tensor]

_OPS = {
    RED_OPS.SUM: SUM, RED_OPS.AVG: AVERAGE, RED_OPS.PRODUCT: PRODUCT, RED_OPS.MIN: MIN, RED_OPS.MAX: MAX,
    RED_OPS.BAND: BAND, RED_OPS.BOR: BOR, RED_OPS.BXOR: BXOR,
}  # fmt: skip
#: What reductions of truth values mean.
_OF_BOOL = {SUM: BOR, MAX: BOR, PRODUCT: BAND, MIN: BAND, BAND: BAND, BOR: BOR, BXOR: BXOR}
_LINEAR = (SUM, AVERAGE)
_ON_WHOLE_NUMBERS = (BAND, BOR, BXOR)

#: Rooms of torch that shard a model.
_SHARDS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._composable")

#: Depth of the stack in which they are looked for.
_FRAMES = 12


class HostCopy:
    """A tensor as flat host memory, which is its own where that is possible.

    Args:
        tensor: any tensor that is strided.
        reads: whether the content is needed.

    Attributes:
        flat: the elements; a complex one counts as two.
    """

    def __init__(self, tensor: torch.Tensor, *, reads: bool = True) -> None:
        # Elements that are conjugated or negated when they are read are other ones in memory.
        self._lazy = tensor.detach() if tensor.is_conj() or tensor.is_neg() else None
        self._plain = tensor.detach().resolve_conj().resolve_neg()
        self._tensor = real_view(self._plain)
        is_own = self._tensor.device.type == "cpu" and self._tensor.is_contiguous()
        if is_own:
            # A dimension of one element may have any stride, and bytes are viewed with stride 1 only.
            self.flat = self._tensor.as_strided((self._tensor.numel(),), (1,))
        elif reads:
            self.flat = to_host(self._tensor).view(-1)
        else:
            self.flat = host_buffer(self._tensor).view(-1)
        self._is_own = is_own

    @property
    def as_bytes(self) -> torch.Tensor:
        """The bytes: planes copy any dtype so."""
        return self.flat.view(torch.uint8)

    def put(self) -> None:
        """Copy to the tensor."""
        if not self._is_own:
            self._tensor.copy_(self.flat.view(self._tensor.shape))
        if self._lazy is not None:
            self._lazy.copy_(self._plain)


class HostRow:
    """Tensors as one run of bytes in host memory; a single one as its own :class:`HostCopy`.

    Attributes:
        content: the bytes.
        counts: bytes of each tensor.
    """

    def __init__(self, tensors: Tensors, *, reads: bool = True) -> None:
        self._hosts = [HostCopy(one, reads=reads) for one in tensors]
        parts = [one.as_bytes for one in self._hosts]
        self.counts = [one.numel() for one in parts]
        if len(parts) == 1:
            self.content = parts[0]
        else:
            self.content = torch.empty(sum(self.counts), dtype=torch.uint8, device="cpu")
            if reads and parts:
                torch.cat(parts, out=self.content)

    def put(self) -> None:
        """Copy to the tensors."""
        for one, part in zip(self._hosts, torch.split(self.content, self.counts), strict=True):
            if len(self._hosts) > 1:
                one.as_bytes.copy_(part)
            one.put()


def add_sparse(plane: Plane, tensor: torch.Tensor, how: Reduction, members: Sequence[int]) -> None:
    """Replace a sparse tensor, a gradient of ``nn.Embedding(sparse=True)``, by the sum over all ranks, or the mean.

    Every rank adds the indices and values of all ranks in their order, so the result is the same on all.

    Raises:
        ProtocolError: a member of the group has indices that this rank's tensor does not have.
    """
    mine, rank = tensor.detach().to("cpu").coalesce(), members[plane.index]
    table = torch.empty(how.size, dtype=torch.int64, device="cpu")
    plane.allgather(torch.tensor([mine._nnz()], device="cpu"), table, [1] * how.size)
    counts = table.tolist()
    check_counts(counts, mine, members, rank)
    rows = _all_rows(plane, mine.indices().t().contiguous(), counts)
    total = added(rows, _all_rows(plane, mine.values(), counts), counts, mine.shape, members, rank).coalesce()
    tensor.copy_(total / how.size if how.op == AVERAGE else total)


def _all_rows(plane: Plane, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the rows of all ranks, one rank's after the other."""
    found = mine.new_empty((sum(counts), *mine.shape[1:]))
    row_bytes = mine[0].nbytes if len(mine) else found[:1].nbytes
    plane.allgather(
        HostCopy(mine).as_bytes, HostCopy(found, reads=False).as_bytes, [row_bytes * count for count in counts]
    )
    return found


def _devices(tensors: Tensors) -> list[torch.device]:
    """Return the devices of tensors that have streams of their own."""
    if all(one.is_cpu for one in tensors):
        return []
    accelerator = torch.accelerator.current_accelerator()
    kind = "" if accelerator is None else accelerator.type
    return sorted({one.device for one in tensors if one.device.type == kind}, key=str)


def ready(tensors: Tensors) -> Callable[[], float]:
    """Note the work of devices so far; returns a function that waits for it, and says how many seconds that took.

    Raises:
        PacelineError: a CUDA graph is captured; its replays would reduce nothing.
    """
    devices = _devices(tensors)
    if any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing():
        raise PacelineError(
            "a CUDA graph captures an operation of the backend paceline, which moves tensors through host memory, so a "
            "replay would not: leave it out of the graph (with DDP, call torch.cuda.make_graphed_callables before the "
            "model is wrapped), or start this script with torchrun"
        )
    events = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def wait() -> float:
        began = time.monotonic() if events else 0.0
        for event in events:
            event.synchronize()
        return time.monotonic() - began if events else 0.0

    return wait


def copying(tensors: Tensors) -> AbstractContextManager[object]:
    """Return the context in which a thread copies tensors that are :func:`ready`; at its end the copies are complete.

    Any thread may change them there: those of ``torch.inference_mode`` need it. Copies of CUDA run on a stream of their
    own: on that of the script they would wait for all kernels that it has begun since, such as the rest of backward.
    """
    devices, is_inference = _devices(tensors), any(one.is_inference() for one in tensors)
    return _copying(tensors, devices, is_inference) if devices or is_inference else nullcontext()


@contextmanager
def _copying(tensors: Tensors, devices: Sequence[torch.device], is_inference: bool) -> Iterator[None]:
    # PyTorch would give memory of a sparse result, once it is freed, to the next copy, whoever still reads it.
    is_beside = not any(one.is_sparse for one in tensors)
    with ExitStack() as stack:
        if is_inference:
            stack.enter_context(torch.inference_mode())
        for device in devices:
            if device.type == "cuda" and is_beside:
                stack.enter_context(torch.cuda.stream(copy_stream(device)))
        yield
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()


# ---- arguments -------------------------------------------------------------------------------------------------------


def operation(opts: Any) -> Any:
    """Return the kind of a reduction; a sum by default."""
    return RED_OPS.SUM if opts is None else opts.reduceOp.op


def is_linear(op: Any) -> bool:
    """Return whether a reduction is a sum or a mean."""
    return _OPS.get(op) in _LINEAR


def reduction_of(op: Any, dtype: torch.dtype, size: int) -> Reduction:
    """Return how tensors of a dtype are reduced.

    Raises:
        ValueError: the operation has no meaning for them.
    """
    number = _OPS.get(op)
    if number is None:
        raise ValueError(f"the backend paceline has no {op}; scale the tensor, and use SUM")
    if dtype == torch.bool:
        number = _OF_BOOL.get(number)
    is_real = dtype.is_floating_point or dtype.is_complex
    if number is None or (dtype.is_complex and number not in _LINEAR) or (is_real and number in _ON_WHOLE_NUMBERS):
        raise ValueError(f"{op} has no meaning for elements of {dtype}")
    found = Reduction(number, dtype.to_real() if dtype.is_complex else dtype, size)
    one = torch.ones(1, dtype=found.dtype, device="cpu")
    try:
        found.reduce([one, one], torch.empty_like(one))
    except RuntimeError as error:  # in the middle of an operation it would break the group
        raise ValueError(f"PyTorch cannot compute {op} of {dtype} on CPUs; cast the tensor first") from error
    return found


def sizes(tensors: Iterable[torch.Tensor]) -> str:
    """Return the number of elements, for errors; the ranks of an operation say the same."""
    return f" of {sum(one.numel() for one in tensors)} elements"


def check_dense(tensors: Tensors, *, but_sparse: bool = False) -> None:
    """Refuse tensors that are no elements in a row; in the middle of an operation they would break the group.

    Raises:
        ValueError: one is like that, and is not a sparse one where these are taken.
    """
    if any(one.layout != torch.strided and not (but_sparse and one.is_sparse) for one in tensors):
        raise ValueError("the backend paceline adds sparse COO tensors in all_reduce only; call to_dense() first")


def check_rank(what: str, rank: int, size: int) -> None:
    """Refuse a root, a receiver or a sender that the group does not have: ``src=``, ``dst=``.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"{what} names rank {rank} of a group whose ranks are 0 to {size - 1}")


def check_size(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Refuse a tensor that does not have as many parts as the group has ranks.

    Raises:
        ValueError: it has not.
    """
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ValueError(
            f"{what} of {size} ranks needs {size} times {part.numel()} elements of {part.dtype} in one tensor, not "
            f"{whole.numel()} of {whole.dtype}"
        )


def check_parts(what: str, parts: Tensors, size: int, mine: torch.Tensor, place: int | None = None) -> None:
    """Refuse tensors of which there is not one for each rank, or that have not as many bytes as ``mine``.

    Args:
        what: the operation.
        parts: the tensors.
        size: number of ranks.
        mine: the tensor of this rank.
        place: the rank whose tensor is compared; None: all are.

    Raises:
        ValueError: they are like that.
    """
    given = [one.nbytes for one in parts]
    if len(given) != size or any(one != mine.nbytes for one in (given if place is None else [given[place]])):
        which = "" if place is None else f", the one of rank {place}"
        needed = f"needs {size} tensors{which} of {mine.nbytes} bytes"
        raise ValueError(f"{what} of {size} ranks {needed}; given are tensors of {given} bytes")


def rows(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the bytes of the parts of a tensor that is split along its first dimension.

    Raises:
        ValueError: it cannot be split like that.
    """
    length = tensor.shape[0] if tensor.dim() else 1
    splits = list(splits) or [length // size] * size
    if len(splits) != size or sum(splits) != length or min(splits) < 0:
        raise ValueError(f"{length} rows cannot be split into {list(splits)} for {size} ranks")
    width = tensor.nbytes // length if length else 0
    return [width * one for one in splits]


def deadline(timeout: timedelta) -> float:
    """Return the deadline of a group's operations: the script's, unless the job has one and the script has not."""
    given = os.environ.get(variable("timeout_s"))
    is_default = timeout == dist.distributed_c10d.default_pg_timeout
    return float(given) if given and is_default else timeout.total_seconds()


def refuse_shards() -> None:
    """Refuse that a model is sharded.

    Raises:
        PacelineError: FSDP or tensor parallelism has called.
    """
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < _FRAMES:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_SHARDS):
            raise PacelineError(
                f"{name} shards the model over the ranks, and the backend paceline runs data parallel training only: "
                "wrap the model in DistributedDataParallel, or start this script with torchrun"
            )
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
