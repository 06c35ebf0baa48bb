"""Sinks, to which a server's store gives complete cohorts.

A store (:class:`~paceline.server.bucket_store.BucketStore`) merges pushes by the rule. What happens to a merged
gradient, and when its workers are answered, is the sink's business:

| sink | a cohort is complete | the rule releases its workers |
|---|---|---|
| :class:`ApplySink` | the updater runs | they are answered |
| :class:`~paceline.server.clip_sink.ClipSink` | it is held for its factor, then applied | so are they |
| :class:`~paceline.server.forward.ForwardStore` | the sum is sent to the owner | they wait for its answer |

Order: the store calls ``complete`` before the ``release`` that follows from it. A sink owns the accumulator that it
gets, and closes it. It takes the requests that it answers out of ``slot.pending``: as long as a worker is in there, its
push is not answered, regardless of the rule.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from paceline.compression import Codec
from paceline.compression.buffers import Bytes
from paceline.consistency import Apply, Policy, Release
from paceline.errors import ConfigError
from paceline.layout.ranges import is_all
from paceline.observe import meter
from paceline.server.bucket import PushRequest, Slot, StoredBucket
from paceline.server.merge import Accumulator
from paceline.updaters import UpdaterSpec
from paceline.wire import messages as m


class Sink(abc.ABC):
    """Takes the complete cohorts of a store, and answers the workers behind them."""

    @abc.abstractmethod
    def complete(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply) -> None:
        """Take a complete cohort; the accumulator is the sink's from now on."""

    @abc.abstractmethod
    def release(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer workers, all of one unit, whose cohort the rule regards as applied; or do so later."""

    def forget(self, bucket: StoredBucket, slot: Slot, worker: int) -> None:  # noqa: B027 - most wait for no worker
        """Note that a worker leaves: wait for nothing that it would have sent."""

    def before_read(self, bucket: StoredBucket, worker: int, span: m.Span) -> None:  # noqa: B027
        """Make visible the values that a worker, which reads a range now, may see: by default the present ones."""


class ApplySink(Sink):
    """Runs the updater of a slot once per complete cohort.

    Attributes:
        spec: the update of every updater.
        codecs: by leg that is compressed, ``push`` or ``pull``.
    """

    def __init__(self, store: str, policy: Policy) -> None:
        self.spec = UpdaterSpec()
        self.codecs: dict[str, Codec] = {}
        self._store, self._policy = store, policy

    # ---- updates ---------------------------------------------------------------------------------------------------

    def complete(
        self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply, factor: float = 1.0
    ) -> None:
        """Make the update of a complete cohort, with its merged gradient times a factor."""
        units, policy = slot.rule.units, self._policy
        meter.active.note_staleness(action.staleness)
        if "pull" in self.codecs:
            bucket.keep_first_version(units.of, is_coded=True)
        elif policy.merge == "groups" and (len(policy.groups) > 1 or units.has_changed):
            bucket.keep_first_version(unit for unit in units.of if not units.is_alone(unit))
        try:
            self._update(bucket, slot, accumulator, action, factor)
        finally:
            accumulator.close()
        readers = slot.readers
        absent = ((0, slot.span.length),) if accumulator.absent is None else accumulator.absent
        if (absent or readers.absent) and policy.merge != "first":
            readers.absent |= dict.fromkeys(action.workers, absent)
        if policy.merge == "all":
            readers.notes = accumulator.notes

    def _update(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply, factor: float) -> None:
        result, absent = accumulator.result(action.weight * factor), accumulator.absent
        rows = bucket.answers
        if rows is not None:
            rows.note_nothing()
        if accumulator.problem and self._policy.merges_rounds:
            self.refuse(slot, action.workers, accumulator.problem)
        elif accumulator.skip:
            slot.rule.stats.skipped += 1
            slot.updater.skip()
        elif absent is None or result is None or (absent and is_all(absent, slot.span.length)):
            slot.updater.update_nothing()
        elif action.weight != 0.0:
            if rows is not None:
                rows.note(action.version, *result, only_rows=slot.updater.is_lazy)
            try:
                if rows is not None and not rows.stores_value:
                    pass
                elif result[0].is_sparse:
                    slot.updater.update_rows(*result, accumulator.options)
                else:
                    slot.updater.update(*result, accumulator.options, absent)
            except Exception as error:  # noqa: BLE001 - process border: waiting workers get their optimizer's error
                slot.break_for(error)
            else:
                self._count_step(slot, accumulator, action.weight)

    def _count_step(self, slot: Slot, accumulator: Accumulator, weight: float) -> None:
        pushed = accumulator.options.groups if accumulator.options else ()
        rate: Any = 1.0
        for group in (*self.spec.groups[:1], *pushed[:1]):
            rate = group.get("lr", rate)
        slot.rule.stats.step_mass += weight * float(rate if isinstance(rate, int | float) else 1.0)

    def refuse(self, slot: Slot, workers: Sequence[int], problem: str) -> Exception:
        """Answer workers with the reason why their pushes cannot make one update; the round counts without it."""
        key, round = slot.updater.pieces[0].key, slot.rule.pushed[workers[0]]
        error = ConfigError(
            f"the workers of store {self._store!r} do not have the same optimizer: {problem}, round {round} (key "
            f"{key!r}); set the same options on every worker before the same step"
        )
        for worker in workers:
            request = slot.pending.pop(worker, None)
            if request is not None:
                request.asker.fail(error)
        return error

    # ---- answers ---------------------------------------------------------------------------------------------------

    def release(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer workers whose update is made."""
        pending, released = slot.pending, set(action.workers)
        # The worker whose push came last has the least time left: the others would wait for it again.
        requests = [pending.pop(worker) for worker in [*reversed(pending)] if worker in released]
        # Without known values of their own, workers see the stored values.
        payload = self._advance(bucket, slot, slot.rule.unit[action.workers[0]], requests) if bucket.snapshots else None
        for request in requests:
            bucket.release(slot, request, payload)

    def _advance(self, bucket: StoredBucket, slot: Slot, unit: int, requests: Sequence[PushRequest]) -> Bytes | None:
        """Let a unit see the slot as it is now; returns the encoded difference, if its workers can use one."""
        codec = self.codecs.get("pull") if bucket.answers is None else None  # rows travel as they are
        # Merged gradients that replace the first values have nothing in common with those: no difference is sent.
        is_replaced = self.spec.name == "assign" and slot.readers.version(unit) == 0
        waiting = [] if is_replaced else [request.worker for request in requests if request.want]
        return bucket.advance(slot, unit, codec, waiting)

    def before_read(self, bucket: StoredBucket, worker: int, span: m.Span) -> None:
        """Let a worker that reads for itself see the values of a range as they are, where pulls are compressed."""
        if "pull" in self.codecs:
            units = bucket.slots[0].rule.units
            if not self._policy.merges_rounds or units.is_alone(units.of[worker]):
                bucket.catch_up(worker, span)
