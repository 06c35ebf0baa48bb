"""The buckets of a store that their server keeps: set up, checked, and reported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from paceline.consistency import Policy
from paceline.errors import KeyMismatchError, ProtocolError
from paceline.server import rows
from paceline.server.admission import check_absent, check_distinct, check_rows, no_updater, pieces_of
from paceline.server.apply import ApplySink
from paceline.server.bucket import StoredBucket
from paceline.server.clip import ClipSink
from paceline.server.codecs import Codecs
from paceline.server.presence import Presence
from paceline.server.store import BucketStore
from paceline.updaters import FlatUpdater, Piece, UpdaterSpec, make_updater
from paceline.wire import messages as m


class OwnStore:
    """The part of a store that one server keeps.

    Args:
        name: of the store.
        policy: merge, bound, weighting and age limit.
        mean: merge to the mean over samples instead of the sum.
        num_workers: of the job.
        allowed: import paths of optimizers that may be loaded here.
        share: keep values in shared memory where workers may map them.
        hosts: of the workers, by rank: sums are made host by host; empty: all on one.
        clips: hold complete cohorts until a worker brings the factor that clips them.

    Attributes:
        store: merges the pushes.
        clip: the sink that holds cohorts; None in a store that does not clip.
        codecs: of both legs.
        has_updater: whether the store knows what a push does.
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
        clips: bool = False,
    ) -> None:
        self.has_updater = policy.merge == "all"
        self.codecs = Codecs(name)
        self._allowed = allowed
        self._apply = ApplySink(name, policy, self.codecs)
        self.clip = ClipSink(self._apply) if clips else None
        # With other merges a worker's values stand still while the server's move on.
        shared = share and policy.merge == "all"
        sink = self.clip or self._apply
        self.store = BucketStore(name, policy, mean, Presence(num_workers), sink, hosts, shared)

    # ---- setting up ------------------------------------------------------------------------------------------------

    def init(
        self, block: int, specs: Sequence[m.BucketSpec], values: Sequence[torch.Tensor], answers: str = ""
    ) -> None:
        """Initialise buckets; nothing happens when one of them cannot be.

        Args:
            block: its number.
            specs: of its buckets that are owned here.
            values: theirs, each flat [length of the bucket].
            answers: what pushes of rows bring back, as in :class:`paceline.wire.messages.Init`.

        Raises:
            KeyMismatchError: a bucket is initialised already.
            ProtocolError: keys do not cover a bucket, or it cannot answer so.
        """
        store = self.store
        self.codecs.check(value.dtype for value in values)
        if any((block, spec.index) in store.buckets for spec in specs):
            raise KeyMismatchError(f"block {block} of store {store.name!r} is initialised already")
        if answers == "merged" and store.policy.merge != "all":
            raise ProtocolError(f"store {store.name!r} has no rounds of all workers whose merged rows it could bring")
        all_pieces = [pieces_of(spec) for spec in specs]
        made = []
        for spec, pieces, own in zip(specs, all_pieces, store.buckets.settle(block, values), strict=True):
            bucket = StoredBucket(own, pieces, store.new_rule(), self._updater(own, pieces), (block, spec.index))
            bucket.answers = rows.answers_of(bucket, answers, store.presence.present)
            made.append(bucket)
        self._keep_known_apart(made)
        store.buckets.add(made)

    def _updater(self, values: torch.Tensor, pieces: Sequence[Piece]) -> FlatUpdater:
        return make_updater(self._apply.spec, values, pieces, self._allowed)

    def set_updater(self, spec: UpdaterSpec, fresh: bool = False) -> None:
        """Set what a push does. Saying the same again keeps the optimizer's state, unless it is to be ``fresh``.

        Raises:
            ValueError: the optimizer is unknown, refuses its options, or needs whole tensors where keys are split.
        """
        if spec == self._apply.spec and self.has_updater and not fresh:
            return
        slots = [(bucket, slot) for bucket in self.store.buckets for slot in bucket.slots]
        if not slots:
            # Options are tried on something, so that a mistake is found now and not at the first key.
            make_updater(spec, torch.zeros(1), [Piece(next(iter(spec.keys), ""), 0, 1, (1, 1))], self._allowed)
        updaters = [
            make_updater(spec, bucket.values[slot.start : slot.stop], slot.updater.pieces, self._allowed)
            for bucket, slot in slots
        ]
        for updater, (_, slot) in zip(updaters, slots, strict=True):
            slot.updater = updater
        self._apply.spec, self.has_updater = spec, True
        self.store.sums_in_float32 = spec.multi_precision

    def set_compression(self, params: dict[str, Any], leg: str) -> None:
        """Set the codec of pushes or of pulls.

        Raises:
            ValueError: unknown leg, codec or parameters, another codec is in use, or it is too late.
            TypeError: a codec for pulls, and values that are not float32.
        """
        buckets = list(self.store.buckets)
        is_new = leg == "pull" and "pull" not in self.codecs
        if is_new and any(slot.pending for bucket in buckets for slot in bucket.slots):
            raise ValueError(
                f"store {self.store.name!r} has unanswered pushes; compress its pull leg before the first push"
            )
        self.codecs.put(params, leg, [bucket.values.dtype for bucket in buckets])
        self._keep_known_apart(buckets)

    def _keep_known_apart(self, buckets: Iterable[StoredBucket]) -> None:
        """Leave the memory of buckets to the known values: workers of this host may map it."""
        if "pull" in self.codecs and self.store.policy.merge == "all":
            for bucket in buckets:
                bucket.keep_known_apart(self._updater)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def check_push(self, worker: int, push: m.Push) -> list[StoredBucket]:
        """Refuse a push that cannot be carried out as a whole; returns the buckets of its entries.

        Raises:
            ConfigError: the store needs an optimizer.
            KeyMismatchError: a bucket was not initialised here.
            ProtocolError: entries that do not exist, or rounds that make no sense.
            RemoteError: an earlier update failed.
        """
        if not self.has_updater:
            raise no_updater(self.store.name, self.store.policy)
        if push.rows:
            check_rows(push)
        if push.coded and "push" not in self.codecs:
            raise ProtocolError(f"a compressed push, but store {self.store.name!r} has no compression")
        buckets = self.check_entries(push)
        for bucket, entry in zip(buckets, push.entries, strict=True):
            if push.rows:
                rows.shape_of(bucket, entry)
            if bucket.answers is not None and not (push.rows or bucket.answers.stores_value):
                raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} takes rows only: it has no values")
            if push.rows and push.want and bucket.answers is None:
                raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} was not made to answer with rows")
        self.store.check_rounds(worker, push, buckets)
        return buckets

    def check_entries(self, push: m.Push | m.PushSum) -> list[StoredBucket]:
        """Refuse entries that overlap, lie outside of their buckets, or are absent in part; returns the buckets."""
        check_distinct(push.entries)
        buckets = [self.store.buckets.checked(entry) for entry in push.entries]
        if push.absent:
            check_absent(push.entries, push.absent, self.store.buckets.get)
        return buckets

    # ---- counters --------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the counters."""
        store, stats = self.store, self.store.stats
        return {
            "slots": sum(len(bucket.slots) for bucket in store.buckets),
            "received_bytes": store.received_bytes,
            "sent_bytes": store.sent_bytes,
            "updates": stats.updates,
            "skipped": stats.skipped,
            "staleness": {str(age): number for age, number in sorted(stats.staleness.items())},
            "weight_sum": stats.weight_sum,
            "step_mass": stats.step_mass,
            "data_mass": {str(worker): mass for worker, mass in sorted(stats.data_mass.items())},
            "dropped": {str(worker): number for worker, number in sorted(stats.dropped.items())},
        }
