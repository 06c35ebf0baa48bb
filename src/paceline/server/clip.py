"""Clipping by the norm over all keys and servers: complete cohorts are held until a worker brings the factor.

A worker asks every server for its part of the norm of its round (``AskNorm``), adds the parts up and says by which
factor the merged gradients are to be scaled (``Commit``). All workers of a unit ask the same and get the same, so whose
commit comes first makes no difference, and the others change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.consistency import Apply, Release
from paceline.errors import ProtocolError
from paceline.server.admission import raise_for
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.clip_state import Asked, Held, Norm, Question, ReplyFn, square_sum
from paceline.server.merge import Accumulator
from paceline.wire import messages as m


class Store(Protocol):
    """What holds cohorts back, and can go on with them."""

    name: str
    clip_norm: float

    def bucket(self, block: int, index: int) -> StoredBucket:
        """Return a bucket."""

    def check_entry(self, bucket: StoredBucket, entry: m.Entry) -> None:
        """Refuse a stretch that lies outside its bucket."""

    def apply(
        self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply, factor: float = 1.0
    ) -> None:
        """Make the update of a complete cohort, whose merged gradient is scaled by a factor."""

    def release_all(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer workers whose update is made."""

    def refuse(self, slot: Slot, workers: Sequence[int], problem: str) -> Exception:
        """Tell workers why their pushes cannot make one update."""


def hold(store: Store, bucket: StoredBucket, slot: Slot, action: Apply) -> None:
    """Keep a complete cohort until its factor is known, and tell those who have asked for its norm."""
    unit, clipping = slot.rule.unit[action.workers[0]], slot.clipping
    accumulator = slot.cohorts.pop(action.cohort)
    squares = {(*bucket.place, slot.start, slot.stop): square_sum(accumulator)}
    rounds = {worker: slot.rule.pushed[worker] for worker in action.workers}
    norm = clipping.norms[unit] = Norm(rounds, squares, accumulator.skip)
    if accumulator.problem:
        norm.error = store.refuse(slot, action.workers, accumulator.problem)
        accumulator.close()
    else:
        clipping.held[unit] = Held(action, accumulator, norm)
    asked = clipping.questions.pop(unit, [])
    clipping.questions[unit] = [one for one in asked if norm.rounds.get(one.question.worker) != one.round]
    for one in asked:
        if norm.rounds.get(one.question.worker) == one.round:
            one.question.take(norm, one.start, one.stop)


def ask(store: Store, worker: int, entries: Sequence[m.Entry], reply: ReplyFn) -> None:
    """Answer with the norm of the merged gradient over what a worker has pushed, when all of it is merged.

    Raises:
        ProtocolError: the store does not clip, or the worker cannot have pushed that.
        RemoteError: an earlier update failed.
    """
    found = [
        (slot, entry)
        for entry in entries
        for slot in bucket_of(store, entry).slots_over(entry.start, entry.length)
    ]  # fmt: skip
    for slot, entry in found:
        raise_for(slot, "")
        if not max(1, slot.rule.pushed[worker]) <= entry.round <= slot.rule.pushed[worker] + 1:
            raise ProtocolError(
                f"worker {worker} asks for the norm of round {entry.round} after round {slot.rule.pushed[worker]}"
            )
    question = Question(worker, reply)
    for slot, entry in found:
        unit, (start, stop) = slot.rule.unit[worker], slot.clip(entry.start, entry.start + entry.length)
        norm = slot.clipping.norms.get(unit)
        question.waiting += 1
        if norm is not None and norm.rounds.get(worker) == entry.round:
            question.take(norm, start, stop)
        else:
            slot.clipping.questions.setdefault(unit, []).append(Asked(question, entry.round, start, stop))
    question.end()


def commit(store: Store, worker: int, body: m.Commit) -> None:
    """Apply what is held of a worker's round; what was committed before stays as it is."""
    buckets = [bucket_of(store, entry) for entry in body.entries]
    for bucket, entry in zip(buckets, body.entries, strict=True):
        if not any(_waits_for(slot, worker, entry) for slot in bucket.slots_over(entry.start, entry.length)):
            continue
        for slot in bucket.cut(entry.start, entry.length):
            if _waits_for(slot, worker, entry):
                release(store, bucket, slot, slot.rule.unit[worker], body.factor, body.skip)


def _waits_for(slot: Slot, worker: int, entry: m.Entry) -> bool:
    """Tell whether a slot holds the cohort of a worker's round."""
    held = slot.clipping.held.get(slot.rule.unit[worker])
    return held is not None and held.norm.rounds.get(worker) == entry.round


def release(store: Store, bucket: StoredBucket, slot: Slot, unit: int, factor: float, skip: bool) -> None:
    """Apply the cohort that is held for a unit, and answer those who wait for it."""
    held = slot.clipping.held.pop(unit)
    held.accumulator.skip = held.accumulator.skip or skip
    store.apply(bucket, slot, held.accumulator, held.action, factor)
    for one in held.releases:
        store.release_all(bucket, slot, one)


def forget(store: Store, bucket: StoredBucket, slot: Slot, worker: int) -> None:
    """Note that a worker leaves: nothing waits for a commit that cannot come any more."""
    clipping = slot.clipping
    for unit, asked in clipping.questions.items():
        clipping.questions[unit] = [one for one in asked if one.question.worker != worker]
    for unit, held in list(clipping.held.items()):
        if not (held.norm.rounds.keys() & slot.rule.live) - {worker}:
            release(store, bucket, slot, unit, 0.0, skip=True)


def is_held(slot: Slot, worker: int) -> bool:
    """Tell whether a worker's last push waits for a commit."""
    held = slot.clipping.held.get(slot.rule.unit[worker])
    return held is not None and worker in held.norm.rounds


def bucket_of(store: Store, entry: m.Entry) -> StoredBucket:
    """Return the bucket of an entry, after checking it.

    Raises:
        ProtocolError: the store does not clip, or the entry lies outside of the bucket.
    """
    if not store.clip_norm:
        raise ProtocolError(f"store {store.name!r} does not clip; open it with a largest norm")
    bucket = store.bucket(entry.block, entry.bucket)
    store.check_entry(bucket, entry)
    return bucket
