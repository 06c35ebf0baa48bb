"""Messages between the ranks and the coordinator, on the job's authenticated connections."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from paceline.errors import ProtocolError
from paceline.hvd.negotiation import Batch, Down, Submission

VERSION = 1


class RankEntered(msgspec.Struct, frozen=True, array_like=True, tag="enter", forbid_unknown_fields=True):
    """A rank has called ``init``.

    Attributes:
        version: of this protocol.
        host: name of the host.
        host_id: the same for processes that can share memory.
        pid: process id.
        sets: process sets.
    """

    version: int
    host: str
    host_id: str
    pid: int
    sets: tuple[tuple[int, ...], ...] = ()


class RankLeft(msgspec.Struct, frozen=True, array_like=True, tag="leave", forbid_unknown_fields=True):
    """A rank has called ``shutdown``, or failed."""

    reason: str
    failed: bool


class Entered(msgspec.Struct, frozen=True, array_like=True, tag="entered", forbid_unknown_fields=True):
    """All ranks have called ``init``.

    Attributes:
        members: what each rank sent.
        fusion_bytes: most bytes that are fused.
    """

    members: tuple[RankEntered, ...]
    fusion_bytes: int


class ToCoordinator(msgspec.Struct, frozen=True, array_like=True):
    """A message of a rank. Generations are counted from 1, one for each ``init``."""

    generation: int
    body: RankEntered | Submission | RankLeft


class ToRank(msgspec.Struct, frozen=True, array_like=True):
    """A message of the coordinator."""

    generation: int
    body: Entered | Batch | Down


Message: TypeAlias = ToCoordinator | ToRank

_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(ToCoordinator)
_from_coordinator = msgspec.msgpack.Decoder(ToRank)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode_at_coordinator(raw: Any) -> ToCoordinator:
    """Read a message of a rank.

    Raises:
        ProtocolError: it is no such message.
    """
    return _decoded(_from_rank, raw)  # type: ignore[no-any-return]


def decode_at_rank(raw: Any) -> ToRank:
    """Read a message of the coordinator.

    Raises:
        ProtocolError: it is no such message.
    """
    return _decoded(_from_coordinator, raw)  # type: ignore[no-any-return]


def _decoded(decoder: Any, raw: Any) -> Any:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"not a message of the Horovod interface: {error}") from error
