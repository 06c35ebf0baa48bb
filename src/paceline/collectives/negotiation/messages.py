"""Messages between ranks and the coordinator, on the job's authenticated connections.

A rank sends requests; the coordinator answers all ranks with responses, in the order in which all of them run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from paceline.collectives.errors import Interface
from paceline.errors import ProtocolError
from paceline.wire.messages import WorkerStep

#: Id of the process set that holds all ranks.
GLOBAL_SET = 0

#: Kinds of operations that move tensors. Their responses can be cached.
TENSOR_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")
#: Kinds whose data travel in the requests and responses themselves.
OBJECT_KINDS = ("broadcast_object", "allgather_object")
#: Kinds that all ranks of the job take part in, whatever their process set.
SET_KINDS = ("add_process_set", "remove_process_set")
KINDS = (*TENSOR_KINDS, *OBJECT_KINDS, *SET_KINDS, "join")

#: Names of the reduce operations, by Horovod's numbers.
OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

Shape: TypeAlias = tuple[int, ...]

#: Stands for the devices of ranks that have unlike ones.
UNLIKE = "unlike"


class OperationRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An operation that one rank is ready for.

    Attributes:
        kind: one of :data:`KINDS`.
        name: pairs requests of different ranks; unique among a rank's pending requests of a kind and process set.
        dtypes: element types, one per tensor.
        shapes: shapes, one per tensor. Several tensors are a group: one operation.
        device: type of the device, such as ``cpu``; in a response :data:`UNLIKE` where the ranks have several.
        op: number of the reduce operation.
        root: rank that broadcasts, counted in the whole job.
        splits: rows for each member of the process set (alltoall).
        alone: never fused with other requests.
        cached: a later request of the same name may be sent as one bit.
        ranks: members of a process set that is added or removed.
        sparse_shape: shape of the sparse tensor of which the entries are gathered.
        payload: pickled object of this rank.
    """

    kind: str
    name: str
    process_set: int = GLOBAL_SET
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    device: str = "cpu"
    op: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    alone: bool = False
    cached: bool = True
    ranks: tuple[int, ...] = ()
    sparse_shape: Shape = ()
    payload: bytes = b""

    @property
    def key(self) -> Key:
        """The data that pairs it with other ranks' requests."""
        return self.process_set, self.kind, self.name


#: Process set, kind and name of an operation.
Key: TypeAlias = tuple[int, str, str]


class Response(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An operation that all ranks run now, or that fails on all.

    Attributes:
        request: the first rank's request; a rank that has joined takes dtypes and shapes from here.
        index: index in the cache from now on; -1: not cached.
        error: why it fails; empty: it runs.
        dims: first dimensions of each tensor, by member (allgather).
        splits: rows for each member, by member (alltoall).
        payloads: objects, by member; only the root's for ``broadcast_object``.
        value: id of a new process set; 1 if a process set was removed; the last rank that joined.
    """

    request: OperationRequest
    index: int = -1
    error: str = ""
    dims: tuple[Shape, ...] = ()
    splits: tuple[Shape, ...] = ()
    payloads: tuple[bytes, ...] = ()
    value: int = -1


class Submission(msgspec.Struct, frozen=True, array_like=True, tag="submit", forbid_unknown_fields=True):
    """The operations for which a rank has become ready.

    Attributes:
        seen: number of the last batch that the rank has handled.
        bits: little-endian bit vector of cached operations.
        requests: operations that are not cached.
    """

    seen: int
    bits: bytes = b""
    requests: tuple[OperationRequest, ...] = ()


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch", forbid_unknown_fields=True):
    """The next work of all ranks, in this order: run the responses, run the operations of the bits, forget.

    Attributes:
        number: batches are counted from 1.
        forgotten: indices that leave the cache.
        responses: operations in the order in which all ranks run them.
        bits: little-endian bit vector of cached operations; they run in the order of their indices.
    """

    number: int
    forgotten: tuple[int, ...] = ()
    responses: tuple[Response, ...] = ()
    bits: bytes = b""


class Down(msgspec.Struct, frozen=True, array_like=True, tag="down", forbid_unknown_fields=True):
    """Everything that is pending fails, and nothing can be submitted any more.

    Attributes:
        rank: because of whom; -1: nobody in particular.
        reason: a sentence.
        failed: whether it is a failure, not an orderly shutdown.
    """

    rank: int
    reason: str
    failed: bool = True

    def text(self, interface: Interface) -> str:
        """Return the error of operations after the end of a generation."""
        who = f"by rank {self.rank}" if self.rank >= 0 else "by the coordinator"
        return (
            f"{interface.name} has been shut down {who}: {self.reason}. Operations that were pending on any rank have "
            f"failed; {interface.go_on} to go on"
        )


#: A message for all ranks, or a text for the log.
Action: TypeAlias = Batch | Down | str


@dataclass(frozen=True)
class NegotiationSettings:
    """Settings of the machine. Times are seconds.

    Attributes:
        cache_capacity: cached operations; 0: no cache.
        stall_warning_s: age at which a request that some ranks lack is reported; 0: never.
        stall_shutdown_s: age at which it ends everything; 0: never.
        conflict_s: age at which operations of one name and different kinds fail on all ranks.
    """

    cache_capacity: int = 1024
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
    conflict_s: float = 10.0


# ---- messages --------------------------------------------------------------------------------------------------------

VERSION = 3


class RankEntered(msgspec.Struct, frozen=True, array_like=True, tag="enter", forbid_unknown_fields=True):
    """A rank has called ``init``.

    Attributes:
        host_id: the same for processes that can share memory.
        planes_since: the generation in which its planes were made; 0: it has none. Unlike ones are made anew.
    """

    version: int
    host: str
    host_id: str
    pid: int
    sets: tuple[tuple[int, ...], ...] = ()
    planes_since: int = 0


class RankLeft(msgspec.Struct, frozen=True, array_like=True, tag="leave", forbid_unknown_fields=True):
    """A rank has called ``shutdown``, or failed."""

    reason: str
    failed: bool


class RankStep(msgspec.Struct, frozen=True, array_like=True, tag="step", forbid_unknown_fields=True):
    """What a rank tells of one of its steps, for the comparison with other ranks.

    Attributes:
        step: its store is the name of the optimizer.
        ranks: the ranks that train these weights; empty: all.
    """

    step: WorkerStep
    ranks: tuple[int, ...] = ()


class Entered(msgspec.Struct, frozen=True, array_like=True, tag="entered", forbid_unknown_fields=True):
    """All ranks have called ``init``; also the most bytes that are fused."""

    members: tuple[RankEntered, ...]
    fusion_bytes: int


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive", forbid_unknown_fields=True):
    """The coordinator is there, while ranks wait for others."""


class ToCoordinator(msgspec.Struct, frozen=True, array_like=True):
    """A message of a rank. Generations are counted from 1, one for each ``init``."""

    generation: int
    body: RankEntered | Submission | RankLeft | RankStep


class ToRank(msgspec.Struct, frozen=True, array_like=True):
    """A message of the coordinator."""

    generation: int
    body: Entered | Batch | Down | Alive


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, Any] = {kind: msgspec.msgpack.Decoder(kind) for kind in (ToCoordinator, ToRank)}
_M = TypeVar("_M", ToCoordinator, ToRank)


def encode(message: ToCoordinator | ToRank) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode(kind: type[_M], raw: Any) -> _M:
    """Read a message of this kind.

    Raises:
        ProtocolError: it is no such message.
    """
    try:
        return _decoders[kind].decode(raw)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"not a message of collective operations: {error}") from error
