"""Buckets whose pushes are merged by the rule; complete cohorts go to a sink.

The life of a push at its server:

| state | what happens | where | next |
|---|---|---|---|
| arrived | its bytes are checked, its entries and rounds too | `pushes.py`, `admission.py` | refused, or checked |
| checked | each slot gives it to its rule: :meth:`BucketStore.take` | here | in a cohort, or dropped as too old |
| in a cohort | its values are summed as they come | `merge.py` | complete, when the rule says `Apply` |
| complete | the sink gets the sum | `apply.py`, `clip.py`, `forward/sink.py` | applied, held or forwarded |
| applied | the rule says `Release`, now or later (bound), or the owner answers | the sink | released by this slot |
| released | by all its slots: see `push_request.py` | | answered |

What else happens to it:

| event | effect |
|---|---|
| it comes again, unanswered | nothing is merged; the later request is answered instead of the first |
| it comes again, answered | nothing is merged; it is answered again |
| its worker leaves | its request is dropped; what it has pushed still counts, and nobody waits for more |
| its update raises | the slot is broken: all who wait get the error, later pushes of it are refused |
| options differ in its cohort | its workers get an error; the round counts, without an update |

What breaks the guarantees: a check after the first `take` (a refused push would count in part); an exception between
the `take` of two slots; a slot that is cut while a caller still uses slots that it found before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from paceline.consistency import (
    Action,
    Apply,
    Groups,
    Merge,
    Policy,
    Pushed,
    Refuse,
    Release,
    Repeat,
    Rule,
    Stats,
    Units,
)  # fmt: skip
from paceline.consistency.objections import objection, objection_to_regrouping
from paceline.errors import ProtocolError
from paceline.ranges import Ranges, within
from paceline.server.admission import absent_in, raise_for
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.buckets import Buckets
from paceline.server.merge import Accumulator, Contribution, Encoded
from paceline.server.presence import Presence
from paceline.server.push_request import PushRequest
from paceline.server.release import release_slot
from paceline.server.scratch import Scratch
from paceline.server.sink import Sink
from paceline.updaters import StepOptions
from paceline.wire import messages as m

#: Length at which the story of a slot is cut.
_MAX_STORY = 4000


class BucketStore:
    """Merges the pushes of a store's buckets.

    Args:
        name: of the store.
        policy: merge, bound, weighting and age limit.
        mean: merge to the mean over samples instead of the sum.
        presence: the workers.
        sink: gets complete cohorts.
        hosts: of the workers, by rank: sums are made host by host; empty: all on one.
        shared: keep values in shared memory, so that workers of this host can map them.

    Attributes:
        sums_in_float32: merge 2-byte values in float32, because the updater keeps float32 masters.
        received_bytes: of values that came from other hosts.
        sent_bytes: of values that went to other hosts.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        mean: bool,
        presence: Presence,
        sink: Sink,
        hosts: Sequence[str] = (),
        shared: bool = False,
    ) -> None:
        self.name, self.policy, self.mean = name, policy, mean
        self.presence, self.sink = presence, sink
        self._units = Units(policy.unit_of(presence.num_workers))
        self.buckets = Buckets(name, shared)
        self.sums_in_float32 = False
        self.received_bytes = self.sent_bytes = 0
        self._hosts = list(hosts) or [""] * presence.num_workers
        self._scratch = Scratch()
        # What weightings look at: updates of all slots.
        self._history = Stats()
        # With ``first`` a worker goes on at once, and may overwrite what is not summed yet.
        self._copies_borrowed = policy.merge == "first"

    def new_rule(self) -> Rule:
        """Return the rule of a new bucket."""
        return self.presence.new_rule(self.policy, Stats(store=self._history))

    @property
    def units(self) -> list[int]:
        """By worker, the unit whose version it reads."""
        return self._units.of

    @property
    def stats(self) -> Stats:
        """The counters of all slots together."""
        total = Stats()
        for bucket in self.buckets:
            for slot in bucket.slots:
                total.add(slot.rule.stats)
        return total

    # ---- pushes ----------------------------------------------------------------------------------------------------

    def check_rounds(self, worker: int, push: m.Push, buckets: Sequence[StoredBucket]) -> None:
        """Refuse a push whose rounds make no sense, or whose values are in memory that is not mapped.

        Args:
            worker: that pushes.
            push: its entries lie inside the buckets.
            buckets: of the entries.

        Raises:
            ProtocolError: with the reason.
            RemoteError: an earlier update failed.
        """
        for entry, bucket in zip(push.entries, buckets, strict=True):
            if push.shared and worker not in bucket.arenas:
                raise ProtocolError(f"worker {worker} has not offered shared memory for block {entry.block}")
            for slot in bucket.slots_over(entry.start, entry.length):
                check_round(slot, worker, entry.round, objection(slot.rule, worker, entry.round, push.samples))

    def push(
        self,
        bucket: StoredBucket,
        entry: m.Entry,
        values: torch.Tensor | Encoded | None,
        push: m.Push,
        options: StepOptions | None,
        request: PushRequest,
    ) -> None:
        """Take one entry of a push that was checked.

        Args:
            bucket: of the entry.
            entry: of the push.
            values: flat [length of the entry], rows of it (sparse), encoded, or None where there is no gradient.
            push: the message.
            options: its options, decoded.
            request: is answered when all slots have released it.
        """
        all_absent = absent_in(push.absent, entry) if push.absent else ()
        slots = bucket.cut(entry.start, entry.length)
        if isinstance(values, Encoded) and len(slots) > 1:
            values = values.decoded()
        for slot in slots:
            part, absent = values, within(all_absent, slot.start, slot.stop)
            if isinstance(part, torch.Tensor) and not push.rows:
                part = part[slot.start - entry.start : slot.stop - entry.start]
            if absent and push.coded and part is not None:
                part = _with_zeros(part, absent)
            borrowed = push.shared and not push.coded and part is not None
            notes = [(request.worker, push.note)] if push.note else ()
            inputs = {request.worker: push.inputs} if push.samples else {}
            one = Contribution(
                part, push.samples, options, borrowed, absent=absent, skip=push.skip, notes=notes, inputs=inputs
            )
            self.take(bucket, slot, [Pushed(request.worker, entry.round, push.samples)], one, request)

    def take(
        self, bucket: StoredBucket, slot: Slot, pushes: Sequence[Pushed], one: Contribution, request: PushRequest
    ) -> None:
        """Give pushes of one slot, summed to one contribution, to its rule, and do what the rule says.

        The request waits until the slot has released all workers behind the pushes.
        """
        request.waits(len(pushes))
        first = pushes[0]
        if first.round > slot.rule.pushed[first.worker]:
            self.presence.at_barrier.discard(first.worker)
        actions = slot.rule.push_sum(pushes)
        if actions and isinstance(actions[0], Repeat) and first.worker not in slot.pending:
            for _ in pushes:
                release_slot(bucket, slot, request)
            return
        # Who asked last is answered.
        for push in pushes:
            slot.pending[push.worker] = request
        self._perform(bucket, slot, actions, one)

    def _perform(self, bucket: StoredBucket, slot: Slot, actions: Sequence[Action], one: Contribution | None) -> None:
        for action in actions:
            if isinstance(action, Merge):
                assert one is not None
                accumulator = slot.cohorts.get(action.cohort) or self._accumulator(slot, action)
                accumulator.add(action.worker, _copied(one) if one.borrowed and self._copies_borrowed else one)
            elif isinstance(action, Apply):
                self.sink.complete(bucket, slot, slot.cohorts.pop(action.cohort), action)
            elif isinstance(action, Release):
                self.sink.release(bucket, slot, action)
            elif isinstance(action, Refuse):
                raise ProtocolError(action.reason)

    def _accumulator(self, slot: Slot, action: Merge) -> Accumulator:
        rule = slot.rule
        unit, units = rule.unit[action.worker], rule.units
        expected: dict[str, list[int]] = {}
        for worker in sorted(rule.live) if self.policy.merges_rounds else ():
            if units.has(unit, worker):
                expected.setdefault(self._hosts[worker], []).append(worker)
        dtype = slot.updater.value.dtype
        if self.sums_in_float32 and dtype.itemsize == 2:
            dtype = torch.float32
        accumulator = Accumulator(list(expected.values()), self.mean, dtype, self._scratch)
        slot.cohorts[action.cohort] = accumulator
        return accumulator

    # ---- workers that come to a barrier or leave -------------------------------------------------------------------

    def pause(self, worker: int) -> None:
        """Note that a worker enters a barrier: until all have, nobody waits for its pushes."""
        self.presence.pause(worker)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._perform(bucket, slot, slot.rule.pause(worker), None)

    def regroup(self, worker: int, generation: int, groups: Groups) -> None:
        """Let a worker step with another group from its next round on.

        Until the first update of that group it reads the values as they are stored now.

        Raises:
            ProtocolError: it has pushes that are not answered, or the groups make no sense.
        """
        if generation <= self._units.generation[worker]:
            return
        slots = [(bucket, slot) for bucket in self.buckets for slot in bucket.slots]
        for _, slot in slots:
            reason = objection_to_regrouping(slot.rule, worker, groups)
            if reason:
                raise ProtocolError(reason)
        self.presence.regroup(worker, generation, groups)
        self._units.move(worker, generation, groups)
        for bucket in self.buckets:
            bucket.regroup(worker, self._units)
        for bucket, slot in slots:
            self._perform(bucket, slot, slot.rule.regroup(worker, generation, groups), None)

    def leave(self, worker: int) -> None:
        """Take a worker out: nobody waits for it any more."""
        self.presence.leave(worker)
        for bucket in self.buckets:
            bucket.arenas.pop(worker, None)
            if bucket.answers is not None:
                bucket.answers.leave(worker)
            for slot in bucket.slots:
                slot.pending.pop(worker, None)
                self.sink.forget(bucket, slot, worker)
                self._perform(bucket, slot, slot.rule.leave(worker), None)

    def missing_for(self, worker: int, entry: m.Entry) -> m.Missing:
        """Return whose pushes the answer to a worker's push waits for, with the story of the first slot that waits.

        Without somebody who is missing, a slot waits when its push is not answered: the update fails or takes long.
        """
        slots = self.buckets.checked(entry).slots_over(entry.start, entry.length)
        missing = [(slot, slot.rule.missing_for(worker)) for slot in slots]
        waits = next((slot for slot, ranks in missing if ranks), None)
        waits = waits or next((slot for slot in slots if worker in slot.pending), None)
        ranks = sorted({rank for _, ranks in missing for rank in ranks})
        return m.Missing(ranks, "" if waits is None else waits.story()[:_MAX_STORY])

    # ---- reads -----------------------------------------------------------------------------------------------------

    def visible(self, bucket: StoredBucket, worker: int) -> torch.Tensor:
        """Return a bucket's values, flat [elements of the bucket], as a worker sees them."""
        return bucket.visible(self.units[worker])

    def read(self, worker: int, entry: m.Entry) -> tuple[int, torch.Tensor]:
        """Note that a worker reads a range now; returns (version, values), the values not to be changed."""
        bucket = self.buckets.get(entry.block, entry.bucket)
        self.sink.before_read(bucket, worker, entry.start, entry.length)
        version = bucket.read(worker, entry.start, entry.length)
        return version, self.visible(bucket, worker)[entry.start : entry.start + entry.length]

    def stands_still(self, worker: int, entry: m.Entry) -> bool:
        """Tell whether values that a worker is sent cannot change before it pushes again."""
        if self.policy.merge != "groups":
            return self.policy.merge == "all"
        return self.units[worker] in self.buckets.get(entry.block, entry.bucket).snapshots


def check_round(slot: Slot, worker: int, round: int, objection: str) -> None:
    """Refuse a push of a slot: for the rule's objection, or because the worker's last push is not answered yet.

    The rule regards a push as answered when its cohort is complete; a sink may answer later.

    Raises:
        ProtocolError: with the reason.
        RemoteError: an earlier update failed.
    """
    if objection or slot.broken is not None:
        raise_for(slot, objection)
    if worker in slot.pending and round > slot.rule.pushed[worker]:
        raise ProtocolError(f"round {round} of worker {worker} came before round {round - 1} was answered")


def _copied(one: Contribution) -> Contribution:
    assert isinstance(one.values, torch.Tensor)
    return dataclasses.replace(one, values=one.values.clone(), borrowed=False)


def _with_zeros(values: torch.Tensor | Encoded, absent: Ranges) -> torch.Tensor:
    """Return decoded values with zeros where there is no gradient: some codecs make something of every element."""
    flat = values.decoded() if isinstance(values, Encoded) else values
    for start, stop in absent:
        flat[start:stop] = 0.0
    return flat
