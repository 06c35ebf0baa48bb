"""A sink that clips by the norm over all keys and servers: it holds complete cohorts until it knows their factor.

After its last push of a round a worker asks every server for its part of the norm (``AskNorm``), adds the parts up, and
says by which factor the merged gradients are scaled (``Commit``):

| state of a cohort | event | next |
|---|---|---|
| open | the last push of its unit arrives | held; its norm answers the questions for it |
| open | a worker asks for its norm | open; the question waits |
| open | complete, but the options of its workers differ | refused: its workers and the questions get the error |
| held | the rule releases its workers | held; they are answered after the update |
| held | a worker asks for its norm | held; answered at once |
| held | the first commit of the unit | applied with that factor; its workers are answered |
| held | every worker of its unit leaves | applied as a round that is skipped |
| applied | a worker asks, or commits | the same norm; no change |

All workers of a unit ask the same and get the same, so the order of their commits makes no difference. A worker cannot
push the next round of a slot before its cohort is applied: its push is not answered. Nothing here has a timeout: a
worker that never commits is found by the timeouts of workers that wait for their answers, and by its own heartbeat.

What breaks the guarantees: workers of a unit that commit different factors, and a sum of squares whose order depends on
where in memory the values lie (then two servers' runs differ in the last bit, and so do their factors).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from paceline.consistency import Apply, Release
from paceline.errors import ProtocolError
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.members import Asker
from paceline.server.merge import Accumulator
from paceline.server.norms import Asked, HeldCohort, Norm, Question, square_sum
from paceline.server.sinks import ApplySink, Sink
from paceline.wire import messages as m

Located: TypeAlias = tuple[StoredBucket, m.Entry]
"""A range, with the round in question, and its bucket."""


class ClipSink(Sink):
    """Holds cohorts until their factor is known, then gives them to the sink that applies them."""

    def __init__(self, sink: ApplySink) -> None:
        self._sink = sink

    def complete(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply) -> None:
        """Hold a complete cohort, and answer the questions for its norm."""
        unit, clipping = slot.rule.unit[action.workers[0]], slot.clipping
        squares = {slot.span: square_sum(accumulator)}
        rounds = {worker: slot.rule.pushed[worker] for worker in action.workers}
        norm = clipping.norms[unit] = Norm(rounds, squares, accumulator.skip)
        if accumulator.problem:
            norm.error = self._sink.refuse(slot, action.workers, accumulator.problem)
            accumulator.close()
        else:
            clipping.held[unit] = HeldCohort(action, accumulator, norm)
        asked = clipping.questions.pop(unit, [])
        clipping.questions[unit] = [one for one in asked if norm.rounds.get(one.question.asker.rank) != one.round]
        for one in asked:
            if norm.rounds.get(one.question.asker.rank) == one.round:
                one.question.take(norm, one.span)

    def release(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer workers, after the update that their unit waits for."""
        held = slot.clipping.held.get(slot.rule.unit[action.workers[0]])
        if held is not None:
            held.releases.append(action)
        else:
            self._sink.release(bucket, slot, action)

    def ask(self, asker: Asker, located: Sequence[Located]) -> None:
        """Answer with the norm of the merged gradient over ranges and rounds of a worker, when all are merged.

        Raises:
            ProtocolError: the worker cannot have pushed that.
            RemoteError: an earlier update failed.
        """
        worker = asker.rank
        found = [(slot, entry) for bucket, entry in located for slot in bucket.slots_over(entry)]
        for slot, entry in found:
            slot.raise_for()
            if not max(1, slot.rule.pushed[worker]) <= entry.round <= slot.rule.pushed[worker] + 1:
                raise ProtocolError(
                    f"worker {worker} asks for the norm of round {entry.round} after round {slot.rule.pushed[worker]}"
                )
        question = Question(asker)
        for slot, entry in found:
            unit, part = slot.rule.unit[worker], slot.span.part(entry.start, entry.stop)
            norm = slot.clipping.norms.get(unit)
            question.waiting += 1
            if norm is not None and norm.rounds.get(worker) == entry.round:
                question.take(norm, part)
            else:
                slot.clipping.questions.setdefault(unit, []).append(Asked(question, entry.round, part))
        question.end()

    def commit(self, worker: int, located: Sequence[Located], factor: float, skip: bool) -> None:
        """Apply the held cohorts of a worker's rounds; those committed before stay as they are."""
        for bucket, entry in located:
            if not any(_waits_for(slot, worker, entry) for slot in bucket.slots_over(entry)):
                continue
            for slot in bucket.cut(entry):
                if _waits_for(slot, worker, entry):
                    self._apply(bucket, slot, slot.rule.unit[worker], factor, skip)

    def _apply(self, bucket: StoredBucket, slot: Slot, unit: int, factor: float, skip: bool) -> None:
        """Apply the cohort that is held for a unit, and answer its workers."""
        held = slot.clipping.held.pop(unit)
        held.accumulator.skip = held.accumulator.skip or skip
        try:
            self._sink.complete(bucket, slot, held.accumulator, held.action, factor)
            for one in held.releases:
                self._sink.release(bucket, slot, one)
        except Exception as error:  # noqa: BLE001 - process border: as for an update that is made without being held
            slot.break_for(error)

    def forget(self, bucket: StoredBucket, slot: Slot, worker: int) -> None:
        """Note that a worker leaves: wait for no commit that cannot come any more."""
        clipping = slot.clipping
        for unit, asked in clipping.questions.items():
            clipping.questions[unit] = [one for one in asked if one.question.asker.rank != worker]
        for unit, held in list(clipping.held.items()):
            if not (held.norm.rounds.keys() & slot.rule.live) - {worker}:
                self._apply(bucket, slot, unit, 0.0, skip=True)

    def before_read(self, bucket: StoredBucket, worker: int, span: m.Span) -> None:
        """Make visible the values that the applied updates let a worker see."""
        self._sink.before_read(bucket, worker, span)


def _waits_for(slot: Slot, worker: int, entry: m.Entry) -> bool:
    """Tell whether a slot holds the cohort of a worker's round."""
    held = slot.clipping.held.get(slot.rule.unit[worker])
    return held is not None and held.norm.rounds.get(worker) == entry.round
