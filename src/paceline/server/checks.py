"""Checks of pushes before any part of them takes effect: a push that is refused has changed nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from paceline.consistency import Pushed
from paceline.consistency.objections import objection, objection_to_sum
from paceline.errors import ConfigError, ProtocolError
from paceline.ranges import is_all, within
from paceline.server import rows
from paceline.server.bucket import StoredBucket
from paceline.server.forward import ForwardStore
from paceline.server.own import OwnStore
from paceline.server.store import absent_in
from paceline.wire import messages as m

StorePart: TypeAlias = OwnStore | ForwardStore


def check_push(part: StorePart, worker: int, push: m.Push) -> list[StoredBucket]:
    """Refuse a push that cannot be carried out as a whole; returns the buckets of its entries.

    Raises:
        ConfigError: the store needs an optimizer.
        KeyMismatchError: a bucket is not here.
        ProtocolError: values of a kind that is not taken here, entries that do not exist, rounds that make no sense, or
            memory that is not mapped.
        RemoteError: an earlier update failed.
    """
    _check_kind(part, push)
    buckets = _check_entries(part, push)
    for entry, bucket in zip(push.entries, buckets, strict=True):
        if push.rows or bucket.answers is not None:
            _check_rows(push, entry, bucket)
        if push.shared and worker not in bucket.arenas:
            raise ProtocolError(f"worker {worker} has not offered shared memory for block {entry.block}")
        for slot in bucket.slots_over(entry):
            slot.check_round(worker, entry.round, objection(slot.rule, worker, entry.round, push.samples))
    return buckets


def _check_kind(part: StorePart, push: m.Push) -> None:
    """Refuse a push to a store that takes none of its kind."""
    name = part.store.name
    if isinstance(part, ForwardStore):
        if push.rows:
            raise ProtocolError("rows go to their server directly")
        if push.coded:
            raise ProtocolError(f"a compressed push, but store {name!r} has no compression here")
        return
    if not part.has_updater:
        raise _no_updater(part)
    if push.rows:
        if push.coded or push.shared:
            raise ProtocolError("rows travel as they are")
        if push.want and len(push.entries) != 1:
            raise ProtocolError(f"an answer brings rows of one key, not of {len(push.entries)}")
    if push.coded and "push" not in part.codecs:
        raise ProtocolError(f"a compressed push, but store {name!r} has no compression")


def _no_updater(own: OwnStore) -> ConfigError:
    return ConfigError(
        f"store {own.store.name!r} merges pushes as {own.store.policy.merge!r} and needs an optimizer where the values "
        "are: call set_optimizer before the first push"
    )


def _check_rows(push: m.Push, entry: m.Entry, bucket: StoredBucket) -> None:
    """Refuse rows of a bucket that does not take them, and anything else for one that takes rows only."""
    if push.rows:
        rows.shape_of(bucket, entry)
    if bucket.answers is not None and not (push.rows or bucket.answers.stores_value):
        raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} takes rows only: it has no values")
    if push.rows and push.want and bucket.answers is None:
        raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} was not made to answer with rows")


def check_sum(own: OwnStore, push: m.PushSum) -> list[StoredBucket]:
    """Refuse a sum that cannot be carried out as a whole; returns the buckets of its entries.

    Raises:
        ConfigError: the store needs an optimizer.
        KeyMismatchError: a bucket was not initialised here.
        ProtocolError: numbers, entries or rounds that make no sense.
        RemoteError: an earlier update failed.
    """
    if not own.has_updater:
        raise _no_updater(own)
    if not push.shares or any(len(share.rounds) != len(push.entries) for share in push.shares):
        raise ProtocolError(f"a sum of {len(push.entries)} entries without one round per entry and worker")
    if not 0 < push.unit < float("inf"):
        raise ProtocolError(f"a sum whose unit is {push.unit} samples")
    if "pull" in own.codecs:
        raise ProtocolError(f"a sum for store {own.store.name!r}, which compresses what it answers every worker")
    buckets = _check_entries(own, push)
    for index, (entry, bucket) in enumerate(zip(push.entries, buckets, strict=True)):
        pushes = pushes_of(push, index)
        for slot in bucket.slots_over(entry):
            reason = objection_to_sum(slot.rule, pushes)
            for one in pushes:
                slot.check_round(one.worker, one.round, reason)
    return buckets


def pushes_of(push: m.PushSum, index: int) -> Sequence[Pushed]:
    """Return what each worker has pushed of one entry of a sum, in the order of ranks."""
    shares = sorted(push.shares, key=lambda share: share.worker)
    return [Pushed(one.worker, one.rounds[index], one.samples) for one in shares]


def _check_entries(part: StorePart, push: m.Push | m.PushSum) -> list[StoredBucket]:
    """Refuse entries that overlap, lie outside of their buckets, or are absent in part; returns the buckets."""
    if len(push.entries) > 1:
        _check_distinct(push.entries)
    buckets = []
    for entry in push.entries:
        buckets.append(part.store.buckets.checked(entry))
    if push.absent:
        _check_absent(part, push)
    return buckets


def _check_distinct(entries: Sequence[m.Entry]) -> None:
    """Refuse a request that pushes an element more than once."""
    for one, other in pairwise(sorted(entries)):
        if one.place == other.place and other.start < one.start + max(1, one.length):
            raise ProtocolError(f"element {other.start} of bucket {one.bucket} is pushed more than once by one request")


def _check_absent(part: StorePart, push: m.Push | m.PushSum) -> None:
    """Refuse a push that reports as absent anything else than whole keys of its own."""
    for one in push.absent:
        pushed = any(e.place == one.place and e.start <= one.start and one.stop <= e.stop for e in push.entries)
        bucket = part.store.buckets.get(one.block, one.bucket)
        # A server that forwards does not know which keys lie where.
        is_key = isinstance(part, ForwardStore) or (bucket.is_edge(one.start) and bucket.is_edge(one.stop))
        if not pushed or not is_key:
            raise ProtocolError(
                f"elements {one.start} to {one.stop} of bucket {one.bucket} are absent, but not a key's in the push"
            )


def is_absent(absent: Sequence[m.Span], entry: m.Entry) -> bool:
    """Tell whether an entry is absent as a whole."""
    return is_all(within(absent_in(absent, entry), entry.start, entry.stop), entry.length)
