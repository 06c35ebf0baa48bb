"""A store as one server holds it: its buckets, its rule settings, its updater."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from paceline.compression.buffers import Bytes
from paceline.consistency import (
    Action,
    Apply,
    Merge,
    Policy,
    Pushed,
    Refuse,
    Release,
    Repeat,
    Rule,
    Stats,
    new_rule,
)
from paceline.errors import ConfigError, KeyMismatchError, ProtocolError, RemoteError
from paceline.ranges import Ranges, is_all, within
from paceline.server import clip, rows
from paceline.server.admission import absent_in, check_absent, check_distinct, check_updater, pieces_of, raise_for
from paceline.server.bucket import Pending, Slot, StoredBucket
from paceline.server.codecs import Codecs
from paceline.server.memory import ValueMemory, map_buckets
from paceline.server.merge import Accumulator, Contribution, Encoded
from paceline.server.scratch import Scratch
from paceline.updaters import Piece, StepOptions, UpdaterSpec, make_updater
from paceline.updaters.runs import completed
from paceline.wire import messages as m

logger = logging.getLogger(__name__)


class ServerStore:
    """What one server holds of a store.

    Args:
        name: of the store.
        policy: merge, bound, weighting and age limit.
        mean: merge to the mean over samples instead of the sum.
        num_workers: of the job.
        allowed: import paths of optimizers that may be loaded here.
        share: keep values in shared memory where workers may look at them in place.
        hosts: of the workers, by rank: sums are made host by host; empty: all on one.
        clip_norm: not 0: complete cohorts are held until a worker brings the factor that clips them.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        mean: bool,
        num_workers: int,
        allowed: Collection[str],
        share: bool = False,
        hosts: Sequence[str] = (),
        clip_norm: float = 0.0,
    ) -> None:
        self.clip_norm = clip_norm
        self.name, self.policy, self.mean = name, policy, mean
        self.spec = UpdaterSpec()
        self.has_updater = policy.merge == "all"
        self.codecs = Codecs(name)
        self.received_bytes = self.sent_bytes = 0
        """Of values that came from and went to other hosts."""
        self._num_workers, self._allowed = num_workers, allowed
        self._hosts = list(hosts) or [""] * num_workers
        self._buckets: dict[tuple[int, int], StoredBucket] = {}
        # With other merges a worker's values stand still while the server's move on.
        self._home = ValueMemory(shared=share and policy.merge == "all")
        self._scratch = Scratch()
        self._history = Stats()
        """What weightings look at: updates of all slots."""
        self._left: set[int] = set()
        self._paused: set[int] = set()

    # ---- setting up ------------------------------------------------------------------------------------------------

    def bucket(self, block: int, index: int) -> StoredBucket:
        """Return a bucket.

        Raises:
            KeyMismatchError: it was not initialised here.
        """
        found = self._buckets.get((block, index))
        if found is None:
            raise KeyMismatchError(f"bucket {index} of block {block} of store {self.name!r} is not initialised here")
        return found

    def has(self, block: int, index: int) -> bool:
        """Tell whether a bucket is initialised here."""
        return (block, index) in self._buckets

    def has_block(self, block: int) -> bool:
        """Tell whether a bucket of a block is initialised here."""
        return any(one == block for one, _ in self._buckets)

    def init(
        self, block: int, specs: Sequence[m.BucketSpec], values: Sequence[torch.Tensor], answers: str = ""
    ) -> None:
        """Initialise buckets; nothing happens when one of them cannot be.

        Args:
            block: its number.
            specs: of its buckets that are owned here.
            values: theirs.
            answers: what pushes of rows bring back, as in :class:`paceline.wire.messages.Init`.

        Raises:
            KeyMismatchError: a bucket is initialised already.
            ProtocolError: keys do not cover a bucket, or it cannot answer so.
        """
        self.codecs.check(value.dtype for value in values)
        for spec in specs:
            if (block, spec.index) in self._buckets:
                raise KeyMismatchError(f"block {block} of store {self.name!r} is initialised already")
        if answers == "merged" and self.policy.merge != "all":
            raise ProtocolError(f"store {self.name!r} has no rounds of all workers whose merged rows it could bring")
        all_pieces = [pieces_of(spec) for spec in specs]
        made = {}
        for spec, pieces, own in zip(specs, all_pieces, self._home.settle(block, values), strict=True):
            updater = make_updater(self.spec, own, pieces, self._allowed)
            bucket = StoredBucket(own, pieces, self.new_rule(), updater, (block, spec.index))
            bucket.answers = rows.answers_of(bucket, answers, self.readers)
            made[block, spec.index] = bucket
        self._keep_known_apart(made.values())
        self._buckets |= made

    @property
    def readers(self) -> set[int]:
        """The workers that have not left."""
        return set(range(self._num_workers)) - self._left

    def new_rule(self) -> Rule:
        """Return the rule of a bucket that is new: it knows who has left, and who waits at a barrier."""
        rule = new_rule(self.policy, self._num_workers, Stats(store=self._history))
        for worker in self._left:
            rule.leave(worker)
        for worker in self._paused:
            rule.pause(worker)
        return rule

    def set_updater(self, spec: UpdaterSpec) -> None:
        """Set what a push does. Saying the same again keeps the optimizer's state.

        Raises:
            ValueError: the optimizer is unknown, refuses its options, or needs whole tensors where keys are split.
        """
        if spec == self.spec and self.has_updater:
            return
        slots = [(bucket, slot) for bucket in self._buckets.values() for slot in bucket.slots]
        values = [bucket.values[slot.start : slot.stop] for bucket, slot in slots]
        if not slots:
            # Options are tried on something, so that a mistake is told now and not at the first key.
            make_updater(spec, torch.zeros(1), [Piece(next(iter(spec.keys), ""), 0, 1, (1, 1))], self._allowed)
        updaters = [
            make_updater(spec, value, slot.updater.pieces, self._allowed)
            for value, (_, slot) in zip(values, slots, strict=True)
        ]
        for updater, (_, slot) in zip(updaters, slots, strict=True):
            slot.updater = updater
        self.spec, self.has_updater = spec, True

    def set_compression(self, params: dict[str, Any], leg: str) -> None:
        """Set the codec of pushes or of pulls.

        Raises:
            ValueError: unknown leg, codec or parameters, another codec is in use, or it is too late.
            TypeError: a codec for pulls, and values that are not float32.
        """
        buckets = self._buckets.values()
        is_new = leg == "pull" and "pull" not in self.codecs
        if is_new and any(slot.pending for bucket in buckets for slot in bucket.slots):
            raise ValueError(f"store {self.name!r} has unanswered pushes; compress its pull leg before the first push")
        self.codecs.put(params, leg, [bucket.values.dtype for bucket in buckets])
        self._keep_known_apart(buckets)

    def _keep_known_apart(self, buckets: Iterable[StoredBucket]) -> None:
        """Leave the memory of buckets to what all readers know: those of this host may look at it in place."""
        if "pull" in self.codecs and self.policy.merge == "all":
            for bucket in buckets:
                bucket.keep_known_apart(lambda value, pieces: make_updater(self.spec, value, pieces, self._allowed))

    def map_arena(self, worker: int, request: m.MapArena) -> None:
        """Map a worker's shared memory for the buckets of a block."""
        mine = {index: bucket for (block, index), bucket in self._buckets.items() if block == request.block}
        if not mine:
            raise KeyMismatchError(f"block {request.block} of store {self.name!r} has no bucket here")
        map_buckets(mine, worker, request, ours=self.values_at(request.block) is not None)

    def values_at(self, block: int) -> tuple[int, list[int]] | None:
        """Return the memfd that holds the values of a block here, and the first element of every bucket in it."""
        return self._home.place(block)

    # ---- pushes ----------------------------------------------------------------------------------------------------

    def check_push(self, worker: int, push: m.Push) -> None:
        """Refuse a push that cannot be carried out as a whole.

        Raises:
            ConfigError: the store needs an optimizer.
            ProtocolError: entries that do not exist, or rounds that make no sense.
            RemoteError: an earlier update failed.
        """
        check_updater(self.has_updater, self.name, self.policy)
        if push.rows and (push.coded or push.shared):
            raise ProtocolError("rows travel as they are")
        if push.rows and push.want and len(push.entries) != 1:
            raise ProtocolError(f"an answer brings rows of one key, not of {len(push.entries)}")
        if push.coded and "push" not in self.codecs:
            raise ProtocolError(f"a compressed push, but store {self.name!r} has no compression")
        check_distinct(push.entries)
        check_absent(push.entries, push.absent, self.bucket)
        for entry in push.entries:
            bucket = self.bucket(entry.block, entry.bucket)
            self.check_entry(bucket, entry)
            if push.rows:
                rows.shape_of(bucket, entry)
            if bucket.answers is not None and not (push.rows or bucket.answers.stores_value):
                raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} takes rows only: it has no values")
            if push.rows and push.want and bucket.answers is None:
                raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} was not made to answer with rows")
            if push.shared and worker not in bucket.arenas:
                raise ProtocolError(f"worker {worker} has not offered shared memory for block {entry.block}")
            for slot in bucket.slots_over(entry.start, entry.length):
                raise_for(slot, slot.rule.objection(worker, entry.round, push.samples))
                self.check_free(slot, worker, entry.round)

    def check_free(self, slot: Slot, worker: int, round: int) -> None:
        """Refuse a push while the last one waits for a commit."""
        if self.clip_norm and round > slot.rule.pushed[worker] and clip.is_held(slot, worker):
            raise ProtocolError(f"round {round} of worker {worker} came before round {round - 1} was answered")

    def check_entry(self, bucket: StoredBucket, entry: m.Entry) -> None:
        """Refuse a stretch that lies outside its bucket."""
        if not bucket.in_range(entry.start, entry.length):
            raise ProtocolError(
                f"elements {entry.start} to {entry.start + entry.length} of a bucket of {bucket.values.numel()}"
            )
        if bucket.answers is not None and (entry.start, entry.length) != (0, bucket.values.numel()):
            raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} is pushed and read as a whole")

    def push(
        self,
        entry: m.Entry,
        values: torch.Tensor | Encoded | None,
        push: m.Push,
        options: StepOptions | None,
        pending: Pending,
    ) -> None:
        """Carry out one entry of a push that was checked."""
        all_absent = absent_in(push.absent, entry) if push.absent else ()
        bucket = self.bucket(entry.block, entry.bucket)
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
            one = Contribution(part, push.samples, options, borrowed, absent=absent, skip=push.skip)
            self.take(bucket, slot, [Pushed(pending.worker, entry.round, push.samples)], one, pending)

    def take(
        self, bucket: StoredBucket, slot: Slot, pushes: Sequence[Pushed], one: Contribution, pending: Pending
    ) -> None:
        """Give a push of one slot to its rule, and do what that says; it is answered when all its workers are."""
        pending.remaining += len(pushes)
        first, rule = pushes[0], slot.rule
        known = rule.pushed[first.worker] >= first.round
        if known and self.clip_norm and clip.is_held(slot, first.worker):
            # Who asked last is answered when the update is made.
            slot.pending |= {each.worker: pending for each in pushes}
            return
        actions = rule.push_sum(pushes)
        if not known or rule.answered[first.worker] < first.round:
            slot.pending |= {each.worker: pending for each in pushes}
        self._perform(bucket, slot, actions, one)
        if known and any(isinstance(action, Repeat) for action in actions):
            for _ in pushes:
                self._release(bucket, slot, pending)

    def flush(self) -> None:
        """Send what has to be sent elsewhere when a push was taken as a whole: nothing, in the store's own place."""

    def leave(self, worker: int) -> None:
        """Take a worker out: nobody waits for it any more."""
        self._left.add(worker)
        self._note_paused(worker, False)
        for bucket in self._buckets.values():
            bucket.arenas.pop(worker, None)
            if bucket.answers is not None:
                bucket.answers.leave(worker)
            for slot in bucket.slots:
                slot.pending.pop(worker, None)
                clip.forget(self, bucket, slot, worker)
                self._perform(bucket, slot, slot.rule.leave(worker), None)

    def pause(self, worker: int) -> None:
        """Note that a worker enters a barrier: until all have, nobody waits for its pushes."""
        self._note_paused(worker, True)
        for bucket in self._buckets.values():
            for slot in bucket.slots:
                self._perform(bucket, slot, slot.rule.pause(worker), None)

    def _note_paused(self, worker: int, paused: bool) -> None:
        """Remember who waits at the barrier, for buckets that are still to come."""
        self._paused = self._paused | {worker} if paused else self._paused - {worker}
        if len(self._paused | self._left) == self._num_workers:
            self._paused = set()

    def _perform(self, bucket: StoredBucket, slot: Slot, actions: Sequence[Action], one: Contribution | None) -> None:
        for action in actions:
            if isinstance(action, Merge):
                assert one is not None
                accumulator = slot.cohorts.get(action.cohort) or self._accumulator(slot, action)
                accumulator.add(action.worker, self._kept(one))
            elif isinstance(action, Apply):
                self._complete(bucket, slot, action)
            elif isinstance(action, Release):
                self.release_all(bucket, slot, action)
            elif isinstance(action, Refuse):
                raise ProtocolError(action.reason)

    def _kept(self, one: Contribution) -> Contribution:
        """Copy what its worker may write over before it is summed: with ``first`` a worker goes on at once."""
        if self.policy.merge != "first" or not one.borrowed:
            return one
        assert isinstance(one.values, torch.Tensor)
        return dataclasses.replace(one, values=one.values.clone(), borrowed=False)

    def _accumulator(self, slot: Slot, action: Merge) -> Accumulator:
        rule = slot.rule
        ordered = self.policy.merges_rounds
        unit = rule.unit[action.worker]
        expected: dict[str, list[int]] = {}
        for worker in sorted(rule.live) if ordered else ():
            if rule.unit[worker] == unit:
                expected.setdefault(self._hosts[worker], []).append(worker)
        master = self.spec.multi_precision and slot.updater.value.dtype.itemsize == 2
        dtype = torch.float32 if master else slot.updater.value.dtype
        accumulator = Accumulator(list(expected.values()), self.mean, dtype, self._scratch)
        slot.cohorts[action.cohort] = accumulator
        return accumulator

    def _complete(self, bucket: StoredBucket, slot: Slot, action: Apply) -> None:
        if self.clip_norm:
            clip.hold(self, bucket, slot, action)
        else:
            self.apply(bucket, slot, slot.cohorts.pop(action.cohort), action)

    def apply(
        self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply, factor: float = 1.0
    ) -> None:
        """Make the update of a complete cohort, whose merged gradient is scaled by a factor."""
        if "pull" in self.codecs or (self.policy.merge == "groups" and len(self.policy.groups) > 1):
            bucket.keep_first_version(slot.rule.unit)
        try:
            self._update(bucket, slot, accumulator, action, factor)
        finally:
            accumulator.close()
        absent = ((0, slot.length),) if accumulator.absent is None else accumulator.absent
        if (absent or slot.absent) and self.policy.merge != "first":
            slot.absent |= dict.fromkeys(action.workers, absent)

    def _update(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply, factor: float) -> None:
        result, weight = accumulator.result(action.weight * factor), action.weight
        absent, told = accumulator.absent, bucket.answers
        if told is not None:
            told.note_nothing()
        if accumulator.problem and self.policy.merges_rounds:
            self.refuse(slot, action.workers, accumulator.problem)
            return
        if accumulator.skip:
            slot.rule.stats.skipped += 1
            slot.updater.skip()
            return
        if absent is None or result is None or is_all(absent, slot.length):
            slot.updater.update_nothing()
            return
        if weight == 0.0:
            return
        if told is not None:
            told.note(action.version, *result, only_rows=slot.updater.is_lazy)
        try:
            if told is not None and not told.stores_value:
                pass
            elif result[0].is_sparse:
                slot.updater.update_rows(*result, accumulator.options)
            else:
                slot.updater.update(*result, accumulator.options, absent)
        except Exception as error:  # noqa: BLE001 - a user's optimizer may raise anything; all who wait must know
            self._break(slot, error)
            return
        groups = completed(accumulator.options.groups if accumulator.options else (), self.spec.groups)
        rate = groups[0].get("lr", 1.0) if groups else 1.0
        slot.rule.stats.step_mass += weight * float(rate if isinstance(rate, int | float) else 1.0)

    def refuse(self, slot: Slot, workers: Sequence[int], problem: str) -> Exception:
        """Tell workers why their pushes cannot make one update; the round counts as made, without it."""
        key, round = slot.updater.pieces[0].key, slot.rule.pushed[workers[0]]
        error = ConfigError(
            f"the workers of store {self.name!r} do not have the same optimizer: {problem}, round {round} (key {key!r})"
            "; set the same options on every worker before the same step"
        )
        for worker in workers:
            pending = slot.pending.pop(worker, None)
            if pending is not None:
                pending.break_off(error)
        return error

    def _break(self, slot: Slot, error: Exception) -> None:
        logger.exception("the update of %s failed", slot.name)
        slot.broken = RemoteError(f"the update of {slot.name} failed: {type(error).__name__}: {error}\n{slot.story()}")
        for pending in set(slot.pending.values()):
            pending.break_off(slot.broken)
        slot.pending.clear()

    def release_all(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer workers whose update is made; while theirs waits for a commit, so do they."""
        held = slot.clipping.held.get(slot.rule.unit[action.workers[0]]) if self.clip_norm else None
        if held is not None:
            held.releases.append(action)
            return
        released = [slot.pending.pop(worker) for worker in action.workers if worker in slot.pending]
        unit = slot.rule.unit[action.workers[0]]
        waiting = [one.worker for one in released if one.want]
        # Merged gradients that replace the first values have nothing in common with those: no difference is sent.
        replaced = self.spec.name == "assign" and slot.readers.version(unit) == 0
        codec = self.codecs.get("pull") if bucket.answers is None else None  # rows travel as they are
        payload = bucket.advance(slot, unit, codec, [] if replaced else waiting)
        for pending in released:
            self._release(bucket, slot, pending, payload)

    def _release(self, bucket: StoredBucket, slot: Slot, pending: Pending, payload: Bytes | None = None) -> None:
        if pending.want and pending.shared:
            self.show(bucket, pending.worker, slot.start, slot.length)
        if pending.want and "pull" in self.codecs and bucket.answers is None:
            pending.told.append(bucket.tell(slot, pending.worker, pending.shared, payload))
        if slot.absent:
            absent = slot.absent.get(pending.worker, ())
            pending.absent |= {(*bucket.place, slot.start + start, stop - start) for start, stop in absent}
        pending.remaining -= 1
        if pending.remaining == 0:
            pending.finish(pending)

    def show(self, bucket: StoredBucket, worker: int, start: int, length: int) -> None:
        """Write values into a worker's arena, unless it looks at ours."""
        arena, part = bucket.arenas[worker], slice(start, start + length)
        if arena.values is not None:
            arena.values[part].copy_(self.visible(bucket, worker)[part])

    # ---- reading ---------------------------------------------------------------------------------------------------

    def visible(self, bucket: StoredBucket, worker: int) -> torch.Tensor:
        """Return a bucket's values as a worker sees them."""
        return bucket.visible(bucket.slots[0].rule.unit[worker]) if bucket.snapshots else bucket.values

    def read(self, worker: int, entry: m.Entry) -> tuple[int, torch.Tensor]:
        """Note that a worker reads a stretch now; returns (version, values), the values not to be changed."""
        bucket = self.bucket(entry.block, entry.bucket)
        if "pull" in self.codecs and not self.policy.merges_rounds:
            # A reader for itself need not stay with what others of its unit were told.
            bucket.catch_up(worker, entry.start, entry.length)
        version = bucket.read(worker, entry.start, entry.length)
        return version, self.visible(bucket, worker)[entry.start : entry.start + entry.length]

    def tell(self, worker: int, entry: m.Entry, shared: bool) -> list[tuple[m.Told, Any]]:
        """Return what to tell a worker that has just read a stretch, in a store that compresses pulls."""
        bucket = self.bucket(entry.block, entry.bucket)
        return bucket.tell_range(worker, entry.start, entry.length, shared)

    def missing_for(self, worker: int, entry: m.Entry) -> list[int]:
        """Return whose push the answer to a worker's push waits for."""
        bucket = self.bucket(entry.block, entry.bucket)
        self.check_entry(bucket, entry)
        slots = bucket.slots_over(entry.start, entry.length)
        return sorted({rank for slot in slots for rank in slot.rule.missing_for(worker)})

    @property
    def values_stand_still(self) -> bool:
        """Whether values that a worker was sent cannot change before it pushes again."""
        return self.policy.merges_rounds

    @property
    def stats(self) -> Stats:
        """The counters of all slots together."""
        total = Stats()
        for bucket in self._buckets.values():
            for slot in bucket.slots:
                total.add(slot.rule.stats)
        return total

    def report(self) -> dict[str, Any]:
        """Return the counters."""
        total = self.stats
        return {
            "slots": sum(len(bucket.slots) for bucket in self._buckets.values()),
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "updates": total.updates,
            "skipped": total.skipped,
            "staleness": {str(age): number for age, number in sorted(total.staleness.items())},
            "weight_sum": total.weight_sum,
            "step_mass": total.step_mass,
            "data_mass": {str(worker): mass for worker, mass in sorted(total.data_mass.items())},
            "dropped": {str(worker): number for worker, number in sorted(total.dropped.items())},
        }


def _with_zeros(values: torch.Tensor | Encoded, absent: Ranges) -> torch.Tensor:
    """Return decoded values with zeros where there is no gradient: some codecs make something of every element."""
    flat = values.decoded() if isinstance(values, Encoded) else values
    for start, stop in absent:
        flat[start:stop] = 0.0
    return flat
