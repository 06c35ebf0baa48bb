"""Checks of requests before any part of them takes effect."""

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


def no_updater(store: str, policy: Policy) -> ConfigError:
    """Return the error for a push to a store that does not know what to do with it."""
    return ConfigError(
        f"store {store!r} merges pushes as {policy.merge!r} and needs an optimizer where the values are: "
        "call set_optimizer before the first push"
    )


def check_clipping(clip_norm: float, policy: Policy) -> None:
    """Refuse a store that clips but has no merged gradient to clip, or no usable norm.

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
    """Raise the error for a push that a slot refuses.

    Raises:
        ProtocolError: the rule's objection.
        RemoteError: an earlier update failed.
    """
    if objection:
        raise ProtocolError(f"{objection}\n{slot.story()}")
    if slot.broken is not None:
        raise RemoteError(str(slot.broken))


def check_rows(push: m.Push) -> None:
    """Refuse a push of rows that asks for what rows cannot do.

    Raises:
        ProtocolError: with the reason.
    """
    if push.coded or push.shared:
        raise ProtocolError("rows travel as they are")
    if push.want and len(push.entries) != 1:
        raise ProtocolError(f"an answer brings rows of one key, not of {len(push.entries)}")


def check_distinct(entries: Sequence[m.Entry]) -> None:
    """Refuse a request that pushes an element more than once.

    Raises:
        ProtocolError: with the element.
    """
    if len(entries) < 2:
        return
    spans = sorted((entry.block, entry.bucket, entry.start, max(1, entry.length)) for entry in entries)
    for (*bucket, start, length), (*next_bucket, next_start, _) in pairwise(spans):
        if bucket == next_bucket and next_start < start + length:
            raise ProtocolError(f"element {next_start} of bucket {bucket[1]} is pushed more than once by one request")


def check_absent(entries: Sequence[m.Entry], absent: Sequence[m.AbsentRange], bucket: BucketFn | None = None) -> None:
    """Refuse a push that reports as absent anything else than whole keys of its own.

    Args:
        entries: of the push.
        absent: ranges without a gradient.
        bucket: finds a bucket; None at a server that does not know which keys lie where.

    Raises:
        ProtocolError: with the elements.
    """
    for one in absent:
        start, stop = one.start, one.start + one.length
        pushed = any(
            (e.block, e.bucket) == (one.block, one.bucket) and e.start <= start and stop <= e.start + e.length
            for e in entries
        )
        found = None if bucket is None else bucket(one.block, one.bucket)
        if not pushed or (found is not None and not (found.is_edge(start) and found.is_edge(stop))):
            raise ProtocolError(
                f"elements {start} to {stop} of bucket {one.bucket} are absent, but not a key's in the push"
            )


def absent_in(absent: Sequence[m.AbsentRange], entry: m.Entry) -> Ranges:
    """Return what is absent in the bucket of an entry, in positions of the bucket."""
    place = entry.block, entry.bucket
    return joined((one.start, one.start + one.length) for one in absent if (one.block, one.bucket) == place)


def is_absent(absent: Sequence[m.AbsentRange], entry: m.Entry) -> bool:
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
