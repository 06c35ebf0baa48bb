"""Local merge at a server: what workers of its host push for buckets of other servers is summed here, and sent once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec
import torch

from paceline.consistency import Apply, Policy, Pushed, Release
from paceline.errors import KeyMismatchError, ProtocolError
from paceline.local_merge import LocalMerge
from paceline.peer.errors_by_name import rebuild
from paceline.ranges import Ranges, is_all, within
from paceline.server.admission import absent_in
from paceline.server.bucket import Pending, Slot, StoredBucket
from paceline.server.merge import Contribution
from paceline.server.store import ServerStore
from paceline.tensors import dtype_of, from_frame, to_frame
from paceline.transport.base import Frames
from paceline.updaters import Piece, StepOptions, UpdaterSpec, make_updater
from paceline.wire import messages as m
from paceline.wire.limits import MAX_FRAME_BYTES

OnAnswer: TypeAlias = Callable[[m.Body, Frames], None]
#: ``ask(owner, body, frames, on_answer)``; what one server is asked arrives there in order.
AskFn: TypeAlias = Callable[[int, m.Request, Frames, OnAnswer], None]


class RelayBucket(StoredBucket):
    """A bucket of another server. Its values are those of the owner's last answer, for the workers here.

    Args:
        values: flat, where workers may look at them.
        spec: index, length and owner.
        block: it belongs to.
        store: that makes its rule.
    """

    def __init__(self, values: torch.Tensor, spec: m.RelayBucket, block: int, store: RelayStore) -> None:
        piece = Piece(f"bucket {spec.index} of block {block}", 0, spec.length)
        updater = make_updater(UpdaterSpec(), values, [piece], ())
        super().__init__(values, [piece], store.new_rule(), updater, (block, spec.index))
        self.spec = spec

    def is_edge(self, position: int) -> bool:
        """Leave it to the owner where keys are."""
        return True


@dataclass(frozen=True)
class _Sum:
    """A cohort of one slot that is complete here."""

    bucket: RelayBucket
    start: int
    length: int
    unit: float
    values: torch.Tensor
    shares: tuple[tuple[int, float, bool], ...]
    """(worker, samples, whether before the barrier at which it may be waiting)."""
    rounds: tuple[int, ...]
    options: StepOptions | None
    done: Callable[[], None]
    """Called when the values are not needed any more."""
    absent: Ranges = ()
    """Where nobody had a gradient."""
    skip: bool = False
    """The update must not be made."""
    problem: str = ""
    """Why the pushes behind it do not go together."""

    @property
    def entry(self) -> m.Entry:
        return m.Entry(*self.bucket.place, self.start, self.length, 0)

    @property
    def gaps(self) -> list[m.Stretch]:
        """Where in the bucket nobody had a gradient."""
        return [m.Stretch(*self.bucket.place, self.start + first, stop - first) for first, stop in self.absent]

    @property
    def frame(self) -> object:
        """The values as a frame; empty when there are none."""
        return b"" if self.absent and is_all(self.absent, self.length) else to_frame(self.values)

    @property
    def together(self) -> tuple[object, ...]:
        """Sums that agree in this travel in one message."""
        return self.bucket.spec.owner, self.unit, self.shares, id(self.options), self.skip, self.problem


class RelayStore(ServerStore):
    """The part of a store that passes on what workers of this host push for servers of other hosts.

    It merges as the owner does, over the workers of this host alone. Where a store would update its values, the sum
    goes to the owner, and where it would answer, it waits for the owner's answer.

    Args:
        name: of the store.
        policy: the store's; bound and weighting are the owner's business.
        mean: merge to the mean over samples.
        relays: who pushes through whom.
        server: rank of this server.
        share: keep values in shared memory where workers may look at them in place.
        ask: sends a request to another server.
    """

    def __init__(
        self, name: str, policy: Policy, mean: bool, relays: LocalMerge, server: int, share: bool, ask: AskFn
    ) -> None:
        if not policy.merges_rounds:
            # Nor has any other merge a push that is dropped: nobody here would be answered for it.
            raise ValueError(f"merge {policy.merge!r} sums nothing over workers, so nothing of it can be passed on")
        super().__init__(name, Policy(policy.merge, policy.groups), mean, len(relays.workers), (), share)
        self.has_updater = True
        self._relays, self._server, self._ask = relays, server, ask
        self._at_barrier: set[int] = set()
        """Workers that have pushed nothing since they came to a barrier."""
        self._outgoing: list[_Sum] = []
        members = {worker for worker in range(len(relays.workers)) if self.owners_for(worker)}
        # Nobody waits here for who pushes elsewhere.
        self._left = set(range(len(relays.workers))) - members
        self._units = {relays.units[worker] for worker in members}

    def owners_for(self, worker: int) -> list[int]:
        """Return the servers for whose buckets a worker pushes here."""
        return self._relays.relayed_by(self._server, worker)

    # ---- setting up ------------------------------------------------------------------------------------------------

    def adopt(self, worker: int, request: m.Relay) -> None:
        """Take buckets of other servers; every worker that is to push them here asks for it, with the same numbers.

        Raises:
            KeyMismatchError: another worker has described them differently.
            ProtocolError: they are not to be pushed here.
        """
        owners = set(self.owners_for(worker))
        if not request.buckets or not all(one.owner in owners for one in request.buckets):
            raise ProtocolError(f"worker {worker} does not push block {request.block} through server {self._server}")
        dtype = dtype_of(request.dtype)
        if any(one.length * dtype.itemsize > MAX_FRAME_BYTES for one in request.buckets):
            raise ProtocolError(f"a bucket of block {request.block} does not fit into a frame")
        if len({one.index for one in request.buckets}) < len(request.buckets):
            raise ProtocolError(f"a bucket of block {request.block} is listed twice")
        known = [self._buckets.get((request.block, one.index)) for one in request.buckets]
        if not any(known):
            self._make(request, dtype)
            return
        for one, bucket in zip(request.buckets, known, strict=True):
            if not isinstance(bucket, RelayBucket) or bucket.spec != one:
                raise KeyMismatchError(f"worker {worker} places block {request.block} of {self.name!r} differently")

    def _make(self, request: m.Relay, dtype: torch.dtype) -> None:
        blank = torch.zeros(1, dtype=dtype)
        homes = self._home.settle(request.block, [blank.expand(one.length) for one in request.buckets])
        for one, values in zip(request.buckets, homes, strict=True):
            self._buckets[request.block, one.index] = RelayBucket(values, one, request.block, self)

    def set_updater(self, spec: UpdaterSpec) -> None:
        """Learn how exactly the owner sums."""
        self.spec = UpdaterSpec(multi_precision=spec.multi_precision)

    # ---- pushes of workers -----------------------------------------------------------------------------------------

    def check_push(self, worker: int, push: m.Push) -> None:
        """Refuse a push that cannot be carried out as a whole; raises as the owner would."""
        if push.rows:
            raise ProtocolError("rows go to their server directly")
        super().check_push(worker, push)
        for entry in push.entries:
            bucket = self.bucket(entry.block, entry.bucket)
            for slot in bucket.slots_over(entry.start, entry.length):
                if worker in slot.pending and entry.round > slot.rule.pushed[worker]:
                    raise ProtocolError(
                        f"round {entry.round} of worker {worker} came before round {entry.round - 1} was answered"
                    )

    def take(
        self, bucket: StoredBucket, slot: Slot, pushes: Sequence[Pushed], one: Contribution, pending: Pending
    ) -> None:
        """Give a push of one slot to its rule, unless it is asked again while the owner's answer is under way."""
        [push] = pushes
        if push.round <= slot.rule.pushed[push.worker] and push.worker in slot.pending:
            # Who asked last is answered.
            pending.remaining += 1
            slot.pending[push.worker] = pending
            return
        self._at_barrier.discard(push.worker)
        super().take(bucket, slot, pushes, one, pending)

    def pause(self, worker: int) -> None:
        """Note that a worker enters a barrier."""
        self._at_barrier.add(worker)
        super().pause(worker)

    def _complete(self, bucket: StoredBucket, slot: Slot, action: Apply) -> None:
        """Put the sum of a complete cohort with those that leave next."""
        assert isinstance(bucket, RelayBucket)
        accumulator = slot.cohorts.pop(action.cohort)
        values, unit = accumulator.sum() or (torch.zeros_like(slot.updater.value), 1.0)
        shares = tuple((one, accumulator.shares[one], one in self._at_barrier) for one in action.workers)
        rounds = tuple(slot.rule.pushed[one] for one in action.workers)
        values = values.to(slot.updater.value.dtype)
        gone, skip, problem = accumulator.absent or (), accumulator.skip, accumulator.problem
        place, options, done = (bucket, slot.start, slot.length), accumulator.options, accumulator.close
        self._outgoing.append(_Sum(*place, unit, values, shares, rounds, options, done, gone, skip, problem))

    def release_all(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Nobody is answered before the owner has answered."""

    # ---- to the owners and back ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the sums that have become complete, all that go together in one message."""
        outgoing: dict[tuple[object, ...], list[_Sum]] = {}
        for one in self._outgoing:
            outgoing.setdefault(one.together, []).append(one)
        self._outgoing = []
        for sums in outgoing.values():
            first = sums[0]
            shares = [
                m.Share(*share, [one.rounds[position] for one in sums]) for position, share in enumerate(first.shares)
            ]
            options = b"" if first.options is None else msgspec.msgpack.encode(first.options)
            absent = [gap for one in sums for gap in one.gaps]
            entries = [one.entry for one in sums]
            body = m.PushSum(
                self.name, entries, shares, first.unit, options, absent, first.skip, first.problem
            )  # fmt: skip
            frames = () if first.skip else [one.frame for one in sums]
            self._ask(first.bucket.spec.owner, body, frames, partial(self._answered, sums))

    def _answered(self, sums: Sequence[_Sum], body: m.Body, frames: Frames) -> None:
        """Answer the workers behind sums."""
        for one in sums:
            one.done()
        try:
            values = self._values_of(sums, body, frames)
        except Exception as error:  # noqa: BLE001 - whatever the owner said, those who wait are told
            for pending in {pending for one in sums for _, _, pending in self._waiting(one)}:
                pending.break_off(error)
            return
        assert isinstance(body, m.Values)
        for one, new in zip(sums, values, strict=True):
            self._home_of(one.bucket, one.shares[0][0])[one.start : one.start + one.length].copy_(new)
            absent = absent_in(body.absent, one.entry) if body.absent else ()
            for bucket, slot, pending in self._waiting(one):
                if absent or slot.absent:
                    slot.absent[pending.worker] = within(absent, slot.start, slot.stop)
                self._release(bucket, slot, pending)

    def _values_of(self, sums: Sequence[_Sum], body: m.Body, frames: Frames) -> list[torch.Tensor]:
        """Return the new values that answer sums."""
        owner = sums[0].bucket.spec.owner
        if isinstance(body, m.Failed):
            raise rebuild(body, f"server {owner}")
        if not isinstance(body, m.Values):
            raise ProtocolError(f"server {owner} answered a sum with {type(body).__name__}")
        if len(frames) != len(sums):
            raise ProtocolError(f"server {owner} answered {len(sums)} sums with {len(frames)} frames of values")
        pairs = zip(sums, frames, strict=True)
        return [from_frame(frame, one.bucket.values.dtype, one.length) for one, frame in pairs]

    def _waiting(self, one: _Sum) -> list[tuple[StoredBucket, Slot, Pending]]:
        """Take out the pushes that wait for a sum; its slot may have been cut since."""
        slots = one.bucket.slots_over(one.start, one.length)
        found = [(slot, slot.pending.pop(worker, None)) for slot in slots for worker, _, _ in one.shares]
        return [(one.bucket, slot, pending) for slot, pending in found if pending is not None]

    def _home_of(self, bucket: RelayBucket, worker: int) -> torch.Tensor:
        """Return where the values of a worker's unit are to be; units see different versions."""
        if len(self._units) > 1:
            bucket.keep_first_version(sorted(self._units))
        return self.visible(bucket, worker)

    def owner_of(self, entry: m.Entry) -> int:
        """Return the server that keeps a bucket."""
        bucket = self.bucket(entry.block, entry.bucket)
        assert isinstance(bucket, RelayBucket)
        return bucket.spec.owner

    def is_under_way(self, worker: int, entry: m.Entry) -> bool:
        """Tell whether all that a worker's push waits for is the owner's answer."""
        bucket = self.bucket(entry.block, entry.bucket)
        self.check_entry(bucket, entry)
        slots = bucket.slots_over(entry.start, entry.length)
        return any(worker in slot.pending for slot in slots) and not any(s.rule.missing_for(worker) for s in slots)
