"""Pushes that are sums over workers of one host, as their owner takes them."""

from __future__ import annotations

import torch

from paceline.consistency import Pushed
from paceline.errors import ProtocolError
from paceline.ranges import within
from paceline.server.admission import absent_in, check_absent, check_distinct, check_updater, raise_for
from paceline.server.bucket import Pending
from paceline.server.merge import Contribution
from paceline.server.store import ServerStore
from paceline.updaters import StepOptions
from paceline.wire import messages as m


def check_sum(store: ServerStore, push: m.PushSum) -> None:
    """Refuse a sum that cannot be carried out as a whole.

    Raises:
        ConfigError: the store needs an optimizer.
        ProtocolError: numbers, entries or rounds that make no sense.
        RemoteError: an earlier update failed.
    """
    check_updater(store.has_updater, store.name, store.policy)
    if not push.shares or any(len(share.rounds) != len(push.entries) for share in push.shares):
        raise ProtocolError(f"a sum of {len(push.entries)} entries without one round per entry and worker")
    if not 0 < push.unit < float("inf"):
        raise ProtocolError(f"a sum whose unit is {push.unit} samples")
    if "pull" in store.codecs:
        raise ProtocolError(f"a sum for store {store.name!r}, which compresses what it answers every worker")
    check_distinct(push.entries)
    check_absent(push.entries, push.absent, store.bucket)
    for index, entry in enumerate(push.entries):
        bucket = store.bucket(entry.block, entry.bucket)
        store.check_entry(bucket, entry)
        for slot in bucket.slots_over(entry.start, entry.length):
            pushes = _pushes(push, index)
            raise_for(slot, slot.rule.objection_to_sum(pushes))
            for one in pushes:
                store.check_free(slot, one.worker, one.round)


def push_sum(
    store: ServerStore,
    index: int,
    values: torch.Tensor | None,
    push: m.PushSum,
    options: StepOptions | None,
    pending: Pending,
) -> None:
    """Carry out one entry of a sum that was checked."""
    entry, pushes = push.entries[index], _pushes(push, index)
    bucket = store.bucket(entry.block, entry.bucket)
    all_absent = absent_in(push.absent, entry) if push.absent else ()
    samples, others = sum(one.samples for one in pushes), tuple(one.worker for one in pushes[1:])
    for slot in bucket.cut(entry.start, entry.length):
        part = None if values is None else values[slot.start - entry.start : slot.stop - entry.start]
        absent = within(all_absent, slot.start, slot.stop)
        one = Contribution(part, samples, options, False, push.unit, others, absent, push.skip, push.problem)
        store.take(bucket, slot, pushes, one, pending)


def _pushes(push: m.PushSum, index: int) -> list[Pushed]:
    """Return what each worker has pushed of one entry of a sum, in the order of ranks."""
    shares = sorted(push.shares, key=lambda share: share.worker)
    return [Pushed(one.worker, one.rounds[index], one.samples, one.before_barrier) for one in shares]
