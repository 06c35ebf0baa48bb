"""Pushes that are sums over workers of one host, as their owner takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.consistency import Pushed
from paceline.consistency.objections import objection_to_sum
from paceline.errors import ProtocolError
from paceline.ranges import within
from paceline.server.admission import absent_in, no_updater
from paceline.server.bucket import StoredBucket
from paceline.server.merge import Contribution
from paceline.server.own import OwnStore
from paceline.server.push_request import PushRequest
from paceline.server.store import BucketStore, check_round
from paceline.updaters import StepOptions
from paceline.wire import messages as m


def check_sum(own: OwnStore, push: m.PushSum) -> list[StoredBucket]:
    """Refuse a sum that cannot be carried out as a whole; returns the buckets of its entries.

    Raises:
        ConfigError: the store needs an optimizer.
        KeyMismatchError: a bucket was not initialised here.
        ProtocolError: numbers, entries or rounds that make no sense.
        RemoteError: an earlier update failed.
    """
    name = own.store.name
    if not own.has_updater:
        raise no_updater(name, own.store.policy)
    if not push.shares or any(len(share.rounds) != len(push.entries) for share in push.shares):
        raise ProtocolError(f"a sum of {len(push.entries)} entries without one round per entry and worker")
    if not 0 < push.unit < float("inf"):
        raise ProtocolError(f"a sum whose unit is {push.unit} samples")
    if "pull" in own.codecs:
        raise ProtocolError(f"a sum for store {name!r}, which compresses what it answers every worker")
    buckets = own.check_entries(push)
    for index, (entry, bucket) in enumerate(zip(push.entries, buckets, strict=True)):
        pushes = pushes_of(push, index)
        for slot in bucket.slots_over(entry.start, entry.length):
            objection = objection_to_sum(slot.rule, pushes)
            for one in pushes:
                check_round(slot, one.worker, one.round, objection)
    return buckets


def push_sum(
    store: BucketStore,
    bucket: StoredBucket,
    index: int,
    values: torch.Tensor | None,
    push: m.PushSum,
    options: StepOptions | None,
    request: PushRequest,
) -> None:
    """Take one entry of a sum that was checked.

    Args:
        store: takes it.
        bucket: of the entry.
        index: of the entry in the message.
        values: flat [length of the entry], or None where there is no gradient.
        push: the message.
        options: its options, decoded.
        request: is answered when all slots have released all workers behind the sum.
    """
    entry, pushes = push.entries[index], pushes_of(push, index)
    all_absent = absent_in(push.absent, entry) if push.absent else ()
    samples, others = sum(one.samples for one in pushes), tuple(one.worker for one in pushes[1:])
    inputs = {share.worker: share.inputs for share in push.shares if share.samples}
    for slot in bucket.cut(entry.start, entry.length):
        part = None if values is None else values[slot.start - entry.start : slot.stop - entry.start]
        absent = within(all_absent, slot.start, slot.stop)
        one = Contribution(
            part, samples, options, False, push.unit, others, absent, push.skip, push.problem, push.notes, inputs
        )
        store.take(bucket, slot, pushes, one, request)


def pushes_of(push: m.PushSum, index: int) -> Sequence[Pushed]:
    """Return what each worker has pushed of one entry of a sum, in the order of ranks."""
    shares = sorted(push.shares, key=lambda share: share.worker)
    return [Pushed(one.worker, one.rounds[index], one.samples, one.before_barrier) for one in shares]
