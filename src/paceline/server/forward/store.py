"""The part of a store that forwards what workers of this host push for servers of other hosts."""

from __future__ import annotations

import torch

from paceline.consistency import Policy
from paceline.errors import KeyMismatchError, ProtocolError
from paceline.local_merge import LocalMerge
from paceline.server.admission import check_absent, check_distinct
from paceline.server.bucket import StoredBucket
from paceline.server.forward.sink import AskFn, ForwardSink
from paceline.server.presence import Presence
from paceline.server.store import BucketStore
from paceline.tensors import dtype_of
from paceline.updaters import Piece, UpdaterSpec, make_updater
from paceline.wire import messages as m
from paceline.wire.limits import MAX_FRAME_BYTES


class ForwardStore:
    """Buckets of a store that other servers own, and that workers of this host push here.

    Pushes are merged as the owner merges them, over the workers of this host alone; see
    :class:`~paceline.server.forward.sink.ForwardSink` for what happens to the sums. The values of a bucket are those of
    the owner's last answer.

    Args:
        name: of the store.
        policy: the store's; bound and weighting are left to the owner.
        mean: merge to the mean over samples.
        local_merge: who pushes through whom.
        server: rank of this server.
        share: keep values in shared memory where workers may map them.
        ask: sends a request to another server.

    Raises:
        ValueError: the policy sums nothing over workers.
    """

    def __init__(
        self, name: str, policy: Policy, mean: bool, local_merge: LocalMerge, server: int, share: bool, ask: AskFn
    ) -> None:
        if not policy.merges_rounds:
            # Other merges may also drop a push, and no answer of the owner would say so here.
            raise ValueError(f"merge {policy.merge!r} sums nothing over workers, so nothing of it can be forwarded")
        self._local_merge, self._server = local_merge, server
        workers = range(len(local_merge.workers))
        members = [worker for worker in workers if self.owners_for(worker)]
        # Nobody waits here for who pushes elsewhere.
        presence = Presence(len(workers), set(workers) - set(members))
        self._sink = ForwardSink(name, presence, {worker: local_merge.units[worker] for worker in members}, ask)
        own_policy = Policy(policy.merge, policy.groups)
        self.store = BucketStore(name, own_policy, mean, presence, self._sink, shared=share)

    def owners_for(self, worker: int) -> list[int]:
        """Return the servers to which this one forwards what a worker pushes."""
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
        if not any(place in self.store.buckets for place in places):
            self._make(request, dtype)
        elif any(self._sink.described.get(place) != one for place, one in zip(places, request.buckets, strict=True)):
            raise KeyMismatchError(f"worker {worker} places block {request.block} of {self.store.name!r} differently")

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
        blank, made = torch.zeros(1, dtype=dtype), []
        zeros = [blank.expand(one.length) for one in request.buckets]
        for one, values in zip(request.buckets, self.store.buckets.settle(request.block, zeros), strict=True):
            pieces = [Piece(f"bucket {one.index} of block {request.block}", 0, one.length)]
            updater = make_updater(UpdaterSpec(), values, pieces, ())
            bucket = StoredBucket(values, pieces, self.store.new_rule(), updater, (request.block, one.index))
            self._sink.described[bucket.place] = one
            made.append(bucket)
        self.store.buckets.add(made)

    def set_updater(self, spec: UpdaterSpec) -> None:
        """Learn how exactly the owner sums."""
        self.store.sums_in_float32 = spec.multi_precision

    # ---- pushes ----------------------------------------------------------------------------------------------------

    def check_push(self, worker: int, push: m.Push) -> list[StoredBucket]:
        """Refuse a push that cannot be carried out as a whole; returns the buckets of its entries.

        Raises:
            KeyMismatchError: a bucket is not forwarded here.
            ProtocolError: rows or compressed values, entries that do not exist, or rounds that make no sense.
        """
        if push.rows:
            raise ProtocolError("rows go to their server directly")
        if push.coded:
            raise ProtocolError(f"a compressed push, but store {self.store.name!r} has no compression here")
        check_distinct(push.entries)
        buckets = [self.store.buckets.checked(entry) for entry in push.entries]
        if push.absent:
            check_absent(push.entries, push.absent)  # where keys are, only the owner knows
        self.store.check_rounds(worker, push, buckets)
        return buckets

    def flush(self) -> None:
        """Send the sums that have become complete: all entries of a push are taken."""
        self._sink.flush()

    def pause(self, worker: int) -> None:
        """Note that a worker enters a barrier, and send what that completes."""
        self.store.pause(worker)
        self._sink.flush()

    def leave(self, worker: int) -> None:
        """Take a worker out, and send what that completes."""
        self.store.leave(worker)
        self._sink.flush()

    # ---- who is waited for -----------------------------------------------------------------------------------------

    def owner_of(self, entry: m.Entry) -> int:
        """Return the server that keeps a bucket."""
        return self._sink.described[self.store.buckets.checked(entry).place].owner

    def waits_for_owner(self, worker: int, entry: m.Entry) -> bool:
        """Tell whether all that a worker's push waits for is the owner's answer."""
        slots = self.store.buckets.checked(entry).slots_over(entry.start, entry.length)
        return any(worker in slot.pending for slot in slots) and not any(s.rule.missing_for(worker) for s in slots)
