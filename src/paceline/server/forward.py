"""The part of a store that forwards pushes of this host's workers for servers of other hosts.

Pushes are merged as the owner merges them, over the workers of this host alone. The sums of complete cohorts go to the
owner, whose answer is the answer of the workers:

| state of a cohort | event | next |
|---|---|---|
| open | the last push of its workers here arrives | complete: put with the sums that leave next |
| complete | `flush`: all entries of the push are taken | sent: one message per owner and kind |
| sent | the rule releases its workers | sent: no worker is answered before the owner has answered |
| sent | a push behind it comes again | sent: the later request is answered instead of the first |
| sent | the owner answers with values | written once to the known values; its workers are answered |
| sent | the owner refuses, or its update fails | its workers get the owner's error, the values stay |
| sent | a worker behind it leaves | sent: the others are answered; the owner hears of the leave after the sum |

Order: the notices of a worker for the owner (a barrier, that it leaves) are sent after its sums, on the same
connection. A message has no timeout here: workers have theirs and ask the owner, through this server, who is missing;
the death of an owner is in the scheduler's news.

What breaks the guarantees: two connections to one owner (a notice could overtake a sum), memory of a sum that changes
before the owner has answered (the transport may send it again), and an answer that is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec
import torch

from paceline.consistency import Apply, Policy, Release
from paceline.errors import KeyMismatchError, ProtocolError
from paceline.layout.local_merge import LocalMerge
from paceline.layout.ranges import is_all, within
from paceline.layout.tensors import dtype_of, from_frame, to_frame
from paceline.net.base import Frames
from paceline.net.call import OnAnswer, rebuild
from paceline.server.bucket import PushRequest, Slot, StoredBucket
from paceline.server.bucket_store import BucketStore, absent_in
from paceline.server.merge import Accumulator
from paceline.server.sinks import Sink
from paceline.updaters import Piece, UpdaterSpec, make_updater
from paceline.wire import messages as m
from paceline.wire.limits import MAX_FRAME_BYTES

#: ``ask(owner, body, frames, on_answer)``; requests to one server arrive there in order.
AskFn: TypeAlias = Callable[[int, m.Request, Frames, OnAnswer], None]


@dataclass(frozen=True)
class Sum:
    """A cohort of one slot that is complete at the forwarding server."""

    owner: int
    bucket: StoredBucket
    span: m.Span
    accumulator: Accumulator
    """Lends the memory of the values; closed when the owner has answered."""
    values: torch.Tensor
    """Flat [length of the span]."""
    unit: float
    """Values times this are the sum of gradients times their samples, where the store merges to the mean."""
    shares: tuple[tuple[int, float], ...]
    """(worker, samples)."""
    rounds: tuple[int, ...]
    """Rounds of the workers, in the order of shares."""

    @property
    def absent(self) -> list[m.Span]:
        """Ranges for which no worker here had a gradient."""
        start = self.span.start
        return [self.span.part(start + first, start + last) for first, last in self.accumulator.absent or ()]

    @property
    def frame(self) -> object:
        """The values as a frame; empty when there are none."""
        return b"" if is_all(self.accumulator.absent or (), self.span.length) else to_frame(self.values)

    @property
    def message_key(self) -> tuple[object, ...]:
        """Sums that agree in this travel in one message."""
        one = self.accumulator
        return self.owner, self.unit, self.shares, id(one.options), one.skip, one.problem


class ForwardStore(BucketStore, Sink):
    """Buckets of a store that other servers own, and that workers of this host push here.

    The values of a bucket are those of the owner's last answer. Bound and weighting are left to the owner.

    Raises:
        ValueError: the policy sums nothing over workers.
    """

    def __init__(
        self, name: str, policy: Policy, mean: bool, local_merge: LocalMerge, server: int, share: bool, ask: AskFn
    ) -> None:
        if not policy.merges_rounds:
            # Other merges may also drop a push, and no answer of the owner would say so here.
            raise ValueError(f"merge {policy.merge!r} sums nothing over workers, so nothing of it can be forwarded")
        self._local_merge, self._server, self._ask = local_merge, server, ask
        self._described: dict[tuple[int, int], m.ForwardedBucket] = {}
        """By (block, index), the buckets as workers have described them, with their owners."""
        self._outgoing: list[Sum] = []
        workers = range(len(local_merge.workers))
        self._units = {local_merge.units[worker] for worker in workers if self.owners_for(worker)}
        own_policy = Policy(policy.merge, policy.groups)
        super().__init__(name, own_policy, mean, len(workers), self, shared=share)
        for worker in workers:
            if not self.owners_for(worker):
                self.unpushed.leave(worker)  # no worker waits here for workers that push elsewhere

    def owners_for(self, worker: int) -> list[int]:
        """Return the servers to which this one forwards a worker's pushes."""
        return self._local_merge.forwarded_by(self._server, worker)

    # ---- setting up ------------------------------------------------------------------------------------------------

    def add_buckets(self, worker: int, request: m.ForwardBuckets) -> None:
        """Take buckets of other servers; every worker that will push them here describes them, all in the same way.

        Raises:
            KeyMismatchError: another worker has described them differently.
            ProtocolError: they are not pushed here.
        """
        dtype = self._check_described(worker, request)
        places = [(request.block, one.index) for one in request.buckets]
        if not any(place in self for place in places):
            self._make(request, dtype)
        elif any(self._described.get(place) != one for place, one in zip(places, request.buckets, strict=True)):
            raise KeyMismatchError(f"worker {worker} places block {request.block} of {self.name!r} differently")

    def _check_described(self, worker: int, request: m.ForwardBuckets) -> torch.dtype:
        owners = set(self.owners_for(worker))
        if not request.buckets or not all(one.owner in owners for one in request.buckets):
            raise ProtocolError(f"worker {worker} does not push block {request.block} through server {self._server}")
        dtype = dtype_of(request.dtype)
        if any(one.length * dtype.itemsize > MAX_FRAME_BYTES for one in request.buckets):
            raise ProtocolError(f"a bucket of block {request.block} does not fit into a frame")
        if len({one.index for one in request.buckets}) < len(request.buckets):
            raise ProtocolError(f"a bucket of block {request.block} is listed twice")
        return dtype

    def _make(self, request: m.ForwardBuckets, dtype: torch.dtype) -> None:
        blank, made = torch.zeros(1, dtype=dtype, device="cpu"), []
        zeros = [blank.expand(one.length) for one in request.buckets]
        for one, values in zip(request.buckets, self.settle(request.block, zeros), strict=True):
            pieces = [Piece(f"bucket {one.index} of block {request.block}", 0, one.length)]
            updater = make_updater(UpdaterSpec(), values, pieces, ())
            bucket = StoredBucket(values, pieces, self.unpushed.copy(), updater, (request.block, one.index))
            self._described[bucket.place] = one
            made.append(bucket)
        self.add(made)

    def set_updater(self, spec: UpdaterSpec) -> None:
        """Learn how exactly the owner sums."""
        self.sums_in_float32 = spec.multi_precision

    def check_kind(self, push: m.Push) -> None:
        """Refuse a push of a kind that is not forwarded.

        Raises:
            ProtocolError: it brings rows, or encoded values.
        """
        if push.rows:
            raise ProtocolError("rows go to their server directly")
        if push.coded:
            raise ProtocolError(f"a compressed push, but store {self.name!r} has no compression here")

    # ---- sums ------------------------------------------------------------------------------------------------------

    def complete(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply) -> None:
        """Put the sum of a complete cohort with those that leave next."""
        dtype = slot.updater.value.dtype
        values, unit = accumulator.sum() or (torch.zeros_like(slot.updater.value), 1.0)
        shares = tuple((one, accumulator.shares[one]) for one in action.workers)
        rounds = tuple(slot.rule.pushed[one] for one in action.workers)
        owner = self._described[bucket.place].owner
        self._outgoing.append(Sum(owner, bucket, slot.span, accumulator, values.to(dtype), unit, shares, rounds))

    def release(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer no worker before the owner has answered."""

    def flush(self) -> None:
        """Send the sums that have become complete, those that go together in one message."""
        outgoing, self._outgoing = self._outgoing, []
        for sums in _batches(outgoing):
            body, frames = _message(self.name, sums)
            self._ask(sums[0].owner, body, frames, partial(self._take_answer, sums))

    def _take_answer(self, sums: Sequence[Sum], body: m.Body, frames: Frames) -> None:
        """Answer the workers behind sums as the owner has answered."""
        for one in sums:
            one.accumulator.close()
        try:
            answer, values = _checked(sums, body, frames)
        except Exception as error:  # noqa: BLE001 - process border: waiting workers get any error
            for request in [request for one in sums for _, request in _take_waiting(one)]:
                request.asker.fail(error)
            return
        for one, new in zip(sums, values, strict=True):
            self._known_values(one)[one.span.start : one.span.stop].copy_(new)
            absent = absent_in(answer.absent, one.span) if answer.absent else ()
            for slot, request in _take_waiting(one):
                slot.readers.notes = answer.notes
                if absent or slot.readers.absent:
                    slot.readers.absent[request.worker] = within(absent, slot.span.start, slot.span.stop)
                one.bucket.release(slot, request)

    def _known_values(self, one: Sum) -> torch.Tensor:
        """Return the values of the bucket as the workers behind a sum know them; units know different versions."""
        if len(self._units) > 1:
            one.bucket.keep_first_version(sorted(self._units))
        return one.bucket.visible(self._local_merge.units[one.shares[0][0]])

    # ---- questions -------------------------------------------------------------------------------------------------

    def owner_of(self, entry: m.Entry) -> int:
        """Return the server that keeps a bucket."""
        return self._described[self.checked(entry).place].owner

    def waits_for_owner(self, worker: int, entry: m.Entry) -> bool:
        """Tell whether all that a worker's push waits for is the owner's answer."""
        slots = self.checked(entry).slots_over(entry)
        return any(worker in slot.pending for slot in slots) and not any(s.rule.missing_for(worker) for s in slots)


def _batches(sums: Iterable[Sum]) -> list[list[Sum]]:
    """Return sums in groups that travel in one message each."""
    found: dict[tuple[object, ...], list[Sum]] = {}
    for one in sums:
        found.setdefault(one.message_key, []).append(one)
    return list(found.values())


def _message(store: str, sums: Sequence[Sum]) -> tuple[m.PushSum, Frames]:
    """Return the message that takes sums of one batch to their owner, and its frames."""
    first, merged = sums[0], sums[0].accumulator
    shares = [m.Share(*share, [one.rounds[number] for one in sums]) for number, share in enumerate(first.shares)]
    options = b"" if merged.options is None else msgspec.msgpack.encode(merged.options)
    entries = [m.Entry(*one.span.place, one.span.start, one.span.length, 0) for one in sums]
    absent = [part for one in sums for part in one.absent]
    notes = list(dict.fromkeys(note for one in sums for note in one.accumulator.notes))
    body = m.PushSum(store, entries, shares, first.unit, options, absent, merged.skip, merged.problem, notes)
    return body, () if merged.skip else [one.frame for one in sums]


def _checked(sums: Sequence[Sum], body: m.Body, frames: Frames) -> tuple[m.Values, list[torch.Tensor]]:
    """Return the owner's answer to sums, and the new values, each flat [length of its span].

    Raises:
        Exception: the error that the owner answered with.
        ProtocolError: the answer does not fit the sums.
    """
    owner = sums[0].owner
    if isinstance(body, m.Failed):
        raise rebuild(body, f"server {owner}")
    if not isinstance(body, m.Values):
        raise ProtocolError(f"server {owner} answered a sum with {type(body).__name__}")
    if len(frames) != len(sums):
        raise ProtocolError(f"server {owner} answered {len(sums)} sums with {len(frames)} frames of values")
    pairs = zip(sums, frames, strict=True)
    return body, [from_frame(frame, one.bucket.values.dtype, one.span.length) for one, frame in pairs]


def _take_waiting(one: Sum) -> list[tuple[Slot, PushRequest]]:
    """Take out the requests that wait for a sum; its slot may have been cut since."""
    slots = one.bucket.slots_over(one.span)
    found = [(slot, slot.pending.pop(worker, None)) for slot in slots for worker, _ in one.shares]
    return [(slot, request) for slot, request in found if request is not None]
