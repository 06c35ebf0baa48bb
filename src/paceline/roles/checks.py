"""What a server refuses before any of it counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.consistency import Policy
from paceline.errors import ConfigError, ProtocolError, RemoteError
from paceline.roles.bucket import Slot
from paceline.updaters import Piece
from paceline.wire import messages as m


def check_updater(has_updater: bool, store: str, policy: Policy) -> None:
    """Refuse pushes to a store that does not know what to do with them.

    Raises:
        ConfigError: with what to call.
    """
    if not has_updater:
        raise ConfigError(
            f"store {store!r} merges pushes as {policy.merge!r} and needs an optimizer where the values are: "
            "call set_optimizer before the first push"
        )


def raise_for(slot: Slot, objection: str) -> None:
    """Raise what speaks against a push of a slot.

    Raises:
        ProtocolError: the rule's objection.
        RemoteError: an earlier update failed.
    """
    if objection:
        raise ProtocolError(objection)
    if slot.broken is not None:
        raise RemoteError(str(slot.broken))


def check_distinct(entries: Sequence[m.Entry]) -> None:
    """Refuse a request that pushes an element more than once.

    Raises:
        ProtocolError: with the element.
    """
    spans = sorted((entry.block, entry.bucket, entry.start, max(1, entry.length)) for entry in entries)
    for (*bucket, start, length), (*next_bucket, next_start, _) in pairwise(spans):
        if bucket == next_bucket and next_start < start + length:
            raise ProtocolError(f"element {next_start} of bucket {bucket[1]} is pushed more than once by one request")


def pieces_of(spec: m.BucketSpec) -> list[Piece]:
    """Return which keys lie where in a bucket.

    Raises:
        ProtocolError: they do not cover it.
    """
    pieces, position = [], 0
    if not len(spec.keys) == len(spec.lengths) == len(spec.shapes):
        raise ProtocolError("a bucket lists different numbers of keys, lengths and shapes")
    for key, length, shape in zip(spec.keys, spec.lengths, spec.shapes, strict=True):
        pieces.append(Piece(key, position, length, tuple(shape)))
        position += length
    if position != spec.length:
        raise ProtocolError(f"keys of {position} elements in a bucket of {spec.length}")
    return pieces
