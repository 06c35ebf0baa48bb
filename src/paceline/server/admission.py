"""What a server refuses before any of it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from paceline.consistency import Policy
from paceline.errors import ConfigError, ProtocolError, RemoteError
from paceline.ranges import Ranges, is_all, joined, within
from paceline.server.bucket import Slot, StoredBucket
from paceline.updaters import Piece
from paceline.wire import messages as m

BucketFn: TypeAlias = Callable[[int, int], StoredBucket]


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


def check_clipping(clip_norm: float, policy: Policy) -> None:
    """Refuse to clip where there is no norm to clip by.

    Raises:
        ValueError: the norm is no positive number, or pushes of one round are not merged.
    """
    if not 0 <= clip_norm < float("inf"):
        raise ValueError(f"gradients are clipped to a norm of {clip_norm}; it must be a positive number")
    if clip_norm and not policy.merges_rounds:
        raise ValueError(
            f"a store that merges pushes as {policy.merge!r} has no merged gradient to clip; clip in the worker"
        )


def raise_for(slot: Slot, objection: str) -> None:
    """Raise what speaks against a push of a slot.

    Raises:
        ProtocolError: the rule's objection.
        RemoteError: an earlier update failed.
    """
    if objection:
        raise ProtocolError(f"{objection}\n{slot.story()}")
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


def check_absent(entries: Sequence[m.Entry], absent: Sequence[m.Stretch], bucket: BucketFn) -> None:
    """Refuse a push that says of something else than whole keys of its own that they have no gradient.

    Args:
        entries: of the push.
        absent: what it says that of.
        bucket: finds a bucket.

    Raises:
        ProtocolError: with the elements.
    """
    for one in absent:
        start, stop, held = one.start, one.start + one.length, bucket(one.block, one.bucket)
        pushed = any(
            (e.block, e.bucket) == (one.block, one.bucket) and e.start <= start and stop <= e.start + e.length
            for e in entries
        )
        if not pushed or not held.is_edge(start) or not held.is_edge(stop):
            raise ProtocolError(
                f"elements {start} to {stop} of bucket {one.bucket} are absent, but not a key's in the push"
            )


def absent_in(absent: Sequence[m.Stretch], entry: m.Entry) -> Ranges:
    """Return what is absent of the bucket of an entry, in positions of the bucket."""
    place = entry.block, entry.bucket
    return joined((one.start, one.start + one.length) for one in absent if (one.block, one.bucket) == place)


def is_absent(absent: Sequence[m.Stretch], entry: m.Entry) -> bool:
    """Tell whether an entry is absent as a whole."""
    return bool(absent) and is_all(
        within(absent_in(absent, entry), entry.start, entry.start + entry.length), entry.length
    )


def pieces_of(spec: m.BucketSpec) -> list[Piece]:
    """Return which keys lie where in a bucket.

    Raises:
        ProtocolError: they do not cover it.
    """
    pieces, position = [], 0
    offsets = spec.offsets or [0] * len(spec.keys)
    if not len(spec.keys) == len(spec.lengths) == len(spec.shapes) == len(offsets):
        raise ProtocolError("a bucket lists different numbers of keys, lengths, shapes and offsets")
    for key, length, shape, offset in zip(spec.keys, spec.lengths, spec.shapes, offsets, strict=True):
        pieces.append(Piece(key, position, length, tuple(shape), offset))
        position += length
    if position != spec.length:
        raise ProtocolError(f"keys of {position} elements in a bucket of {spec.length}")
    return pieces
