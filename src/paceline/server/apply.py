"""The sink of a server's own buckets: updates values with complete cohorts, and answers the workers behind them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.compression.buffers import Bytes
from paceline.consistency import Apply, Policy, Release
from paceline.counting import ALIKE, difference_of, mixture_of
from paceline.errors import ConfigError, RemoteError
from paceline.ranges import is_all
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.codecs import Codecs
from paceline.server.merge import Accumulator
from paceline.server.push_request import PushRequest
from paceline.server.release import release_slot
from paceline.updaters import UpdaterSpec
from paceline.updaters.runs import completed

logger = logging.getLogger(__name__)


class ApplySink:
    """Runs the updater of a slot once per complete cohort.

    Args:
        store: name, for messages.
        policy: of the store.
        codecs: of the store; that of the pull leg is used here.

    Attributes:
        spec: what the updaters do.
    """

    def __init__(self, store: str, policy: Policy, codecs: Codecs) -> None:
        self.spec = UpdaterSpec()
        self._store, self._policy, self._codecs = store, policy, codecs
        self._has_said = False

    # ---- updates ---------------------------------------------------------------------------------------------------

    def complete(
        self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply, factor: float = 1.0
    ) -> None:
        """Make the update of a complete cohort, with its merged gradient times a factor."""
        units = slot.rule.units
        if "pull" in self._codecs:
            bucket.keep_first_version(units.of, is_coded=True)
        elif self._policy.merge == "groups" and (len(self._policy.groups) > 1 or units.has_changed):
            bucket.keep_first_version(unit for unit in units.of if not units.is_alone(unit))
        try:
            self._update(bucket, slot, accumulator, action, factor)
        finally:
            accumulator.close()
        absent = ((0, slot.length),) if accumulator.absent is None else accumulator.absent
        if (absent or slot.absent) and self._policy.merge != "first":
            slot.absent |= dict.fromkeys(action.workers, absent)
        if self._policy.merge == "all":
            slot.notes = accumulator.notes

    def _update(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply, factor: float) -> None:
        result, absent = accumulator.result(action.weight * factor), accumulator.absent
        if bucket.answers is not None:
            bucket.answers.note_nothing()
        objection = accumulator.objection
        self._say_what_differs(bucket, accumulator, objection)
        if objection and self._policy.merges_rounds:
            self.refuse(slot, action.workers, objection)
        elif accumulator.skip:
            slot.rule.stats.skipped += 1
            slot.updater.skip()
        elif absent is None or result is None or is_all(absent, slot.length):
            slot.updater.update_nothing()
        elif action.weight != 0.0:
            if bucket.answers is not None:
                bucket.answers.note(action.version, *result, only_rows=slot.updater.is_lazy)
            try:
                if bucket.answers is not None and not bucket.answers.stores_value:
                    pass
                elif result[0].is_sparse:
                    slot.updater.update_rows(*result, accumulator.options)
                else:
                    slot.updater.update(*result, accumulator.options, absent)
            except Exception as error:  # noqa: BLE001 - process border: workers that wait get their optimizer's error
                self._break(slot, error)
            else:
                self._count_step(slot, accumulator, action.weight)

    def _count_step(self, slot: Slot, accumulator: Accumulator, weight: float) -> None:
        groups = completed(accumulator.options.groups if accumulator.options else (), self.spec.groups)
        rate = groups[0].get("lr", 1.0) if groups else 1.0
        slot.rule.stats.step_mass += weight * float(rate if isinstance(rate, int | float) else 1.0)

    def _say_what_differs(self, bucket: StoredBucket, accumulator: Accumulator, objection: object) -> None:
        """Say once per store that workers weigh alike, or not, whose numbers of samples may differ."""
        if self._has_said or bucket.place != (0, 0):  # one server has the first bucket, and says it for all
            return
        unlike = difference_of(accumulator.inputs)
        if objection and not self._policy.merges_rounds:
            unlike = mixture_of(accumulator.inputs)
        if unlike:
            self._has_said = True
            logger.warning("%s, %s", unlike, ALIKE)

    def refuse(self, slot: Slot, workers: Sequence[int], objection: tuple[str, str]) -> Exception:
        """Answer workers with the reason why their pushes cannot make one update; the round counts without it."""
        key, round = slot.updater.pieces[0].key, slot.rule.pushed[workers[0]]
        problem, way_out = objection
        error = ConfigError(
            f"the workers of store {self._store!r} {problem}, round {round} (key {key!r}); {way_out} before the same "
            "step"
        )
        for worker in workers:
            request = slot.pending.pop(worker, None)
            if request is not None:
                request.fail(error)
        return error

    def _break(self, slot: Slot, error: Exception) -> None:
        logger.exception("the update of %s failed", slot.name)
        slot.broken = RemoteError(f"the update of {slot.name} failed: {type(error).__name__}: {error}\n{slot.story()}")
        for request in slot.pending.values():
            request.fail(slot.broken)
        slot.pending.clear()

    # ---- answers ---------------------------------------------------------------------------------------------------

    def release(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer workers whose update is made."""
        requests = [slot.pending.pop(worker) for worker in action.workers if worker in slot.pending]
        # Without known values of their own, workers see the stored values.
        payload = self._advance(bucket, slot, slot.rule.unit[action.workers[0]], requests) if bucket.snapshots else None
        for request in requests:
            release_slot(bucket, slot, request, payload)

    def _advance(self, bucket: StoredBucket, slot: Slot, unit: int, requests: Sequence[PushRequest]) -> Bytes | None:
        """Let a unit see the slot as it is now; returns the encoded difference, if its workers can use one."""
        codec = self._codecs.get("pull") if bucket.answers is None else None  # rows travel as they are
        # Merged gradients that replace the first values have nothing in common with those: no difference is sent.
        is_replaced = self.spec.name == "assign" and slot.readers.version(unit) == 0
        waiting = [] if is_replaced else [request.worker for request in requests if request.want]
        return bucket.advance(slot, unit, codec, waiting)

    def before_read(self, bucket: StoredBucket, worker: int, start: int, length: int) -> None:
        """Let a worker that reads for itself see the values of a range as they are, where pulls are compressed."""
        units = bucket.slots[0].rule.units
        if "pull" in self._codecs and (not self._policy.merges_rounds or units.is_alone(units.of[worker])):
            bucket.catch_up(worker, start, length)

    def forget(self, bucket: StoredBucket, slot: Slot, worker: int) -> None:
        """Wait for nothing: updates are made at once."""
