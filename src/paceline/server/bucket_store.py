"""Buckets whose pushes are merged by the rule; complete cohorts go to a sink.

The life of a push at its server:

| state | what happens | where | next |
|---|---|---|---|
| arrived | its bytes are checked, its entries and rounds too | `push.py` | refused, or checked |
| checked | each slot gives it to its rule: :meth:`BucketStore.take` | here | in a cohort, or dropped as too old |
| in a cohort | its values are summed as they come | `merge.py` | complete, when the rule says `Apply` |
| complete | the sink gets the sum | `sinks.py`, `clip_sink.py`, `forward.py` | applied, held or forwarded |
| applied | the rule says `Release`, now or later (bound), or the owner answers | the sink | released by this slot |
| released | by all its slots: see `PushRequest` | `bucket.py` | answered |

What else happens to it:

| event | effect |
|---|---|
| it is the K-th of a cohort with a time of grace | the cohort is open until that has ended: `end_graces` |
| it comes again, unanswered | it is not merged; the later request is answered instead of the first |
| it comes again, answered | it is not merged, but answered again |
| its worker leaves | its request is dropped; its earlier pushes still count, and no worker waits for more |
| its sum or its update raises | the slot is broken: waiting workers get the error, later pushes of it are refused |
| options differ in its cohort | its workers get an error; the round counts, without an update |

What breaks the guarantees: a push that was not checked; a check after the first `take` (it would count in part); an
exception between the `take` of two slots; a slot that is cut while a caller still uses slots that it found before.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter

import torch

from paceline.consistency import (
    Action,
    Apply,
    Grace,
    Groups,
    Merge,
    Policy,
    Pushed,
    Release,
    Repeat,
    Rule,
    Stats,
    new_rule,
)  # fmt: skip
from paceline.consistency.objections import objection_to_regrouping
from paceline.errors import KeyMismatchError, ProtocolError
from paceline.layout.ranges import Ranges, joined, within
from paceline.net.memory import MappedArena, SharedTensor, map_foreign, pages
from paceline.observe import meter
from paceline.observe.account import APPLY, MERGE
from paceline.server.bucket import PushRequest, Slot, StoredBucket
from paceline.server.merge import Accumulator, Contribution, Encoded, Scratch
from paceline.server.sinks import Sink
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Length at which the story of a slot is cut.
_MAX_STORY = 4000


class BucketStore:
    """Merges the pushes of a store's buckets.

    Args:
        name: name of the store.
        policy: merge, bound, weighting and age limit.
        mean: merge to the mean over samples instead of the sum.
        num_workers: number of the job's workers.
        sink: the sink that gets complete cohorts.
        hosts: hosts of the workers, by rank: sums are made host by host; empty: all on one.
        shared: keep values in files, one per block, that workers of this host can map; every bucket starts on a page.

    Attributes:
        unpushed: rule of a slot without pushes: new buckets go on from it.
        sums_in_float32: merge 2-byte values in float32, because the updater keeps float32 masters.
        received_bytes: bytes of values that came from other hosts.
        sent_bytes: bytes of values that went to other hosts.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        mean: bool,
        num_workers: int,
        sink: Sink,
        hosts: Sequence[str] = (),
        shared: bool = False,
    ) -> None:
        self.name, self.policy, self.mean, self.sink = name, policy, mean, sink
        # Updates of all slots, for weightings.
        self.unpushed = new_rule(policy, num_workers, Stats(store=Stats()))
        self._shared = shared
        self._buckets: dict[tuple[int, int], StoredBucket] = {}
        """By block and index."""
        self._files: dict[int, tuple[SharedTensor, list[int]]] = {}
        """By block: its file, and the first element of every bucket in it."""
        self.sums_in_float32 = False
        self.received_bytes = self.sent_bytes = 0
        self._hosts = list(hosts) or [""] * num_workers
        self._expected: dict[int, list[list[int]]] = {}
        """By unit, host by host, the workers that its next cohorts wait for."""
        self._scratch = Scratch()
        # With ``first`` a worker goes on at once, and may overwrite values that are not summed yet.
        self._copies_borrowed = policy.merge == "first"
        self._graces: deque[tuple[float, StoredBucket, m.Span, int]] = deque()
        """Times of grace, the first to end first: when that is, and whose: a range may be cut into slots meanwhile."""

    def __iter__(self) -> Iterator[StoredBucket]:
        return iter(self._buckets.values())

    def __contains__(self, place: object) -> bool:
        return place in self._buckets

    def get(self, block: int, index: int) -> StoredBucket:
        """Return a bucket.

        Raises:
            KeyMismatchError: it was not initialised here.
        """
        found = self._buckets.get((block, index))
        if found is None:
            raise KeyMismatchError(f"bucket {index} of block {block} of store {self.name!r} is not initialised here")
        return found

    def add(self, buckets: Sequence[StoredBucket]) -> None:
        """Add new buckets."""
        self._buckets |= {bucket.place: bucket for bucket in buckets}

    def has_block(self, block: int) -> bool:
        """Tell whether a bucket of a block is here."""
        return any(one == block for one, _ in self._buckets)

    def checked(self, span: m.Span) -> StoredBucket:
        """Return the bucket of a range that a request names.

        Raises:
            KeyMismatchError: it was not initialised here.
            ProtocolError: the range lies outside of it, or is a part of a bucket that is pushed as a whole.
        """
        bucket = self._buckets.get((span.block, span.bucket)) or self.get(span.block, span.bucket)
        numel = bucket.values.numel()
        if not 0 <= span.start <= numel - span.length or (span.length == 0 and numel > 0):
            raise ProtocolError(f"elements {span.start} to {span.stop} of a bucket of {numel}")
        if bucket.answers is not None and span.length != numel:
            raise ProtocolError(f"bucket {span.bucket} of block {span.block} is pushed and read as a whole")
        return bucket

    @property
    def units(self) -> list[int]:
        """By worker, the unit whose version it reads."""
        return self.unpushed.units.of

    @property
    def stats(self) -> Stats:
        """The counters of all slots together."""
        total = Stats()
        for bucket in self:
            for slot in bucket.slots:
                total.add(slot.rule.stats)
        return total

    # ---- pushes ----------------------------------------------------------------------------------------------------

    def push(
        self,
        bucket: StoredBucket,
        entry: m.Entry,
        pushes: Sequence[Pushed],
        one: Contribution,
        all_absent: Sequence[m.Span],
        request: PushRequest,
    ) -> None:
        """Take one entry of a push that was checked; ``one`` has the values of the whole entry."""
        slots = bucket.cut(entry)
        request.unreleased += len(slots) * len(pushes) - 1
        if len(slots) == 1 and not all_absent:
            self.take(bucket, slots[0], pushes, one, request)
            return
        in_bucket = absent_in(all_absent, entry)
        values = one.values
        coded = isinstance(values, Encoded)
        if isinstance(values, Encoded):
            values = values.decoded()  # some codecs make something of every element, absent or not
        for slot in slots:
            span, part = slot.span, values
            absent = within(in_bucket, span.start, span.stop)
            if part is not None and not part.is_sparse:
                part = part[span.start - entry.start : span.stop - entry.start]
                for start, stop in absent if coded else ():
                    part[start:stop] = 0.0
            self.take(bucket, slot, pushes, dataclasses.replace(one, values=part, absent=absent), request)

    def take(
        self, bucket: StoredBucket, slot: Slot, pushes: Sequence[Pushed], one: Contribution, request: PushRequest
    ) -> None:
        """Give pushes of one slot, summed to one contribution, to its rule, and carry out the rule's actions.

        The rule has no objection to them: that was checked before any part of the request took effect.

        The request waits until the slot has released all workers behind the pushes.
        """
        first = pushes[0]
        actions = slot.rule.take(pushes)
        if actions and isinstance(actions[0], Repeat) and first.worker not in slot.pending:
            for _ in pushes:
                bucket.release(slot, request)
            return
        for push in pushes:
            slot.pending[push.worker] = request  # the last request is answered
        self._note_last(slot, pushes, actions)
        self._perform(bucket, slot, actions, one)

    def _note_last(self, slot: Slot, pushes: Sequence[Pushed], actions: Sequence[Action]) -> None:
        """Note how long other workers have waited for the one whose push lets them go on."""
        now, before = meter.active.now(), slot.arrived
        slot.arrived = now
        if len(actions) == 1 or self.policy.merge == "first":  # no worker goes on, or none has waited
            return
        pushers = set(map(attrgetter("worker"), pushes))
        for action in actions:
            if isinstance(action, Release) and not pushers.issuperset(action.workers):
                meter.active.came_last(pushes[0].worker, now - before)
                return

    def _perform(self, bucket: StoredBucket, slot: Slot, actions: Sequence[Action], one: Contribution | None) -> None:
        try:
            for action in actions:
                if isinstance(action, Merge):
                    assert one is not None
                    before = meter.active.enter(MERGE)
                    accumulator = slot.cohorts.get(action.cohort) or self._accumulator(slot, action)
                    accumulator.add(action.worker, _copied(one) if one.borrowed and self._copies_borrowed else one)
                    meter.active.leave(before)
                elif isinstance(action, Apply):
                    before = meter.active.enter(APPLY)
                    self.sink.complete(bucket, slot, slot.cohorts.pop(action.cohort), action)
                    meter.active.leave(before)
                    meter.active.note_update()
                elif isinstance(action, Grace):
                    until = meter.active.now() + self.policy.grace_s
                    self._graces.append((until, bucket, slot.span, action.cohort))
                elif isinstance(action, Release):
                    self.sink.release(bucket, slot, action)
        except Exception as error:  # noqa: BLE001 - process border: all workers of the round get it, not only the last
            slot.break_for(error)

    def _accumulator(self, slot: Slot, action: Merge) -> Accumulator:
        unit = slot.rule.unit[action.worker]
        expected = self._expected.get(unit)
        if expected is None:
            expected = self._expected[unit] = self._workers_of(unit) if self.policy.merges_rounds else []
        dtype = slot.updater.value.dtype
        if self.sums_in_float32 and dtype.itemsize == 2:
            dtype = torch.float32
        accumulator = Accumulator(expected, self.mean, dtype, self._scratch)
        slot.cohorts[action.cohort] = accumulator
        return accumulator

    def _workers_of(self, unit: int) -> list[list[int]]:
        """Return the workers that a unit's cohorts wait for, host by host."""
        rule, found = self.unpushed, dict[str, list[int]]()
        for worker in sorted(rule.live):
            if rule.units.has(unit, worker):
                found.setdefault(self._hosts[worker], []).append(worker)
        return list(found.values())

    def end_graces(self, now: float) -> float:
        """End the times of grace that are over; returns how long the next one lasts, infinite where there is none."""
        while self._graces and self._graces[0][0] <= now:
            _, bucket, span, cohort = self._graces.popleft()
            for slot in bucket.slots_over(span):
                self._perform(bucket, slot, slot.rule.end_grace(cohort), None)
        return self._graces[0][0] - now if self._graces else math.inf

    # ---- workers that come to a barrier or leave -------------------------------------------------------------------

    def change(self, event: Callable[[Rule], Sequence[Action]]) -> None:
        """Let all rules take an event of a worker, those of slots to come too, and carry out their actions."""
        event(self.unpushed)
        self._expected.clear()
        for bucket in self:
            for slot in bucket.slots:
                self._perform(bucket, slot, event(slot.rule), None)

    def regroup(self, worker: int, generation: int, groups: Groups) -> None:
        """Let a worker step with another group from its next round on.

        Until the first update of that group it reads the values as they are stored now.

        Raises:
            ProtocolError: it has pushes that are not answered, or the groups make no sense.
        """
        units = self.unpushed.units
        if generation <= units.generation[worker]:
            return
        slots = [(bucket, slot) for bucket in self for slot in bucket.slots]
        for rule in (self.unpushed, *(slot.rule for _, slot in slots)):
            reason = objection_to_regrouping(rule, worker, groups)
            if reason:
                raise ProtocolError(reason)
        self.unpushed.regroup(worker, generation, groups)
        self._expected.clear()
        for bucket in self:
            bucket.regroup(worker, units)
        for bucket, slot in slots:
            self._perform(bucket, slot, slot.rule.regroup(worker, generation, groups), None)

    def leave(self, worker: int) -> None:
        """Take a worker out: no other waits for it any more."""
        self.unpushed.leave(worker)
        self._expected.clear()
        for bucket in self:
            bucket.arenas.pop(worker, None)
            if bucket.answers is not None:
                bucket.answers.leave(worker)
            for slot in bucket.slots:
                slot.pending.pop(worker, None)
                self.sink.forget(bucket, slot, worker)
                self._perform(bucket, slot, slot.rule.leave(worker), None)

    def rejoin(self, worker: int, phase: int) -> None:
        """Take in another process of a worker that has left; it has read nothing yet."""
        for bucket in self:
            for slot in bucket.slots:
                slot.readers.forget(worker)
        self.change(lambda rule: rule.rejoin(worker, phase))

    def missing_for(self, worker: int, entry: m.Entry) -> m.Missing:
        """Return whose pushes the answer to a worker's push waits for, with the story of the first slot that waits.

        Without somebody who is missing, a slot waits when its push is not answered: the update fails or takes long.
        """
        slots = self.checked(entry).slots_over(entry)
        missing = [(slot, slot.rule.missing_for(worker)) for slot in slots]
        waits = next((slot for slot, ranks in missing if ranks), None)
        waits = waits or next((slot for slot in slots if worker in slot.pending), None)
        ranks = sorted({rank for _, ranks in missing for rank in ranks})
        return m.Missing(ranks, "" if waits is None else waits.story()[:_MAX_STORY])

    # ---- reads -----------------------------------------------------------------------------------------------------

    def read(self, worker: int, span: m.Span) -> torch.Tensor:
        """Note that a worker reads a range now; returns the values, not to be changed."""
        bucket = self.get(span.block, span.bucket)
        self.sink.before_read(bucket, worker, span)
        return bucket.read(worker, span)

    def stands_still(self, worker: int, span: m.Span) -> bool:
        """Tell whether values that a worker is sent cannot change before it pushes again."""
        if worker in self.unpushed.paused or worker in self.unpushed.away:
            return False  # the others go on while the answer is under way
        if self.policy.merge != "groups":
            return self.policy.merge == "all"
        return self.units[worker] in self.get(span.block, span.bucket).snapshots

    # ---- memory ----------------------------------------------------------------------------------------------------

    def settle(self, block: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the values of a block's buckets, in the memory where they stay."""
        if not self._shared or not values:
            return [value.clone() for value in values]
        dtype = values[0].dtype
        *starts, numel = accumulate((pages(value.numel(), dtype) for value in values), initial=0)
        try:
            file = SharedTensor(numel, dtype)
        except OSError as error:
            logger.warning("no shared memory for %d values (%s); workers get copies by sockets", numel, error)
            return [value.clone() for value in values]
        self._files[block] = file, starts
        placed = [file.tensor[start : start + value.numel()] for start, value in zip(starts, values, strict=True)]
        for own, value in zip(placed, values, strict=True):
            own.copy_(value)
        return placed

    def close(self) -> None:
        """Close the files; the values stay as long as anybody maps them or refers to them."""
        for file, _ in self._files.values():
            file.close()
        self._files = {}

    def values_at(self, block: int) -> tuple[int, list[int]] | None:
        """Return the memfd of a block and the first element of every bucket in it, or None where there is no file."""
        found = self._files.get(block)
        return None if found is None else (found[0].fd, found[1])

    def map_arena(self, worker: int, request: m.MapArena) -> None:
        """Map a worker's shared memory for the buckets of a block.

        Raises:
            KeyMismatchError: no bucket of the block is here.
            ProtocolError: the memory does not match the request, or is too small.
        """
        buckets = {index: bucket for (block, index), bucket in self._buckets.items() if block == request.block}
        if not buckets:
            raise KeyMismatchError(f"block {request.block} of store {self.name!r} has no bucket here")
        dtype = next(iter(buckets.values())).values.dtype
        numel = request.size_bytes // dtype.itemsize
        ends = [request.starts[i] + b.values.numel() for i, b in buckets.items() if i < len(request.starts)]
        if len(ends) != len(buckets) or max(ends) > numel:
            raise ProtocolError(f"the arena of block {request.block} does not hold its buckets")
        if request.value_fd < 0 and request.block not in self._files:
            raise ProtocolError(f"the values of block {request.block} are not in shared memory")
        values = map_foreign(request.pid, request.value_fd, numel, dtype) if request.value_fd >= 0 else None
        grads = map_foreign(request.pid, request.grad_fd, numel, dtype)
        for index, bucket in buckets.items():
            part = slice(request.starts[index], request.starts[index] + bucket.values.numel())
            bucket.arenas[worker] = MappedArena(None if values is None else values[part], grads[part])


def check_once(spans: Sequence[m.Span], what: str) -> None:
    """Refuse a request that names an element twice: its answer could be any number of times as large as the values.

    Raises:
        ProtocolError: it does.
    """
    for one, other in pairwise(sorted(spans)):
        if one.place == other.place and other.start < one.start + max(1, one.length):
            raise ProtocolError(f"element {other.start} of bucket {one.bucket} is {what} more than once by one request")


def absent_in(absent: Sequence[m.Span], entry: m.Span) -> Ranges:
    """Return the absent ranges in the bucket of an entry, in positions of the bucket."""
    return joined((one.start, one.stop) for one in absent if one.place == entry.place)


def _copied(one: Contribution) -> Contribution:
    assert isinstance(one.values, torch.Tensor)
    return dataclasses.replace(one, values=one.values.clone(), borrowed=False)
