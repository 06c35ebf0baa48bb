"""A bucket as its server holds it: the values, the slots in which they are updated, and the pushes that wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from paceline.compression import Codec
from paceline.compression.buffers import Bytes
from paceline.consistency import Rule, Units
from paceline.errors import ProtocolError, RemoteError
from paceline.host.plain_text import described
from paceline.layout.interval_map import IntervalMap
from paceline.layout.tensors import to_frame
from paceline.naming import listed
from paceline.net.memory import MappedArena
from paceline.server.members import Asker
from paceline.server.merge import Accumulator, Notes
from paceline.server.norms import Clipping
from paceline.server.readers import Readers
from paceline.server.rows import RowAnswers
from paceline.updaters import FlatUpdater, Piece
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

Known: TypeAlias = tuple[m.KnownRange, Any]
"""A range as its worker knows it after the answer, and its frame; None: the values are in the worker's memory."""


@dataclass(eq=False, kw_only=True)
class PushRequest:
    """A push, or a sum of pushes, that is not answered yet.

    | state | event | next |
    |---|---|---|
    | waiting | an entry cannot be taken | answered, with that error, by the handler of requests |
    | waiting | `waits`: an entry is taken by several slots, or a slot is cut | waiting |
    | waiting | `release`: a slot has done its part | waiting; answered after the last |
    | waiting | its asker is answered with an error | answered |
    | answered | `release`, an error | answered: no answer is sent twice |

    A push that comes again before its answer is a new request, which takes the place of the first one in every slot.
    The first is then never answered: no asker waits for it any more.

    What breaks the guarantees: a slot that forgets a request without `release` or an error (its worker waits until its
    timeout), and a `waits` that is missing (the answer is sent before all updates are made).
    """

    asker: Asker
    """The member that gets the answer."""
    worker: int
    """The worker that pushes; of a sum, the first worker behind it."""
    unreleased: int
    """Releases to come: one of each slot for each worker behind the push. At first, one for each of its entries."""
    reply: Callable[[PushRequest], None]
    """Sends the answer, once all slots have released the push."""
    want: bool = True
    """The answer brings new values."""
    shared: bool = False
    """The values are written to the worker's memory."""
    known: list[Known] | None = None
    """The ranges that the worker knows after the answer, which lists them if the store compresses pulls; else None."""
    absent: set[m.Span] = field(default_factory=set)
    """Ranges that the answer lists as without any gradient."""
    notes: Notes | None = None
    """The notes that all slots have; None before the first slot is released."""

    def release(self) -> None:
        """Note that one slot has done its part; answer after the last."""
        self.unreleased -= 1
        if self.unreleased == 0 and not self.asker.is_answered:
            try:
                self.reply(self)
            except Exception as error:  # noqa: BLE001 - process border: the update is made, and nobody else answers
                self.asker.fail(error)


@dataclass(eq=False)
class Slot:
    """A range of a bucket with one rule state and one updater.

    A push of a part of a slot cuts it: both halves go on where it stands. Neighbours that stand alike when a push
    covers them are joined. A request that only asks about a part gets the answer of the slot: all its elements have
    the same rule, version and open cohorts.
    """

    span: m.Span
    rule: Rule
    updater: FlatUpdater
    cohorts: dict[int, Accumulator] = field(default_factory=dict)
    pending: dict[int, PushRequest] = field(default_factory=dict)
    """By worker: its push that is not answered."""
    broken: Exception | None = None
    readers: Readers = field(default_factory=Readers)
    clipping: Clipping = field(default_factory=Clipping)
    """Used in a store that clips."""
    arrived: float = 0.0
    """When its last push came, on the clock of the meter."""

    @property
    def range(self) -> slice:
        """Where the slot lies in the bucket."""
        return slice(self.span.start, self.span.stop)

    @property
    def name(self) -> str:
        """Its keys, the first of many, for errors."""
        return listed(repr(piece.key) for piece in self.updater.pieces)

    def story(self) -> str:
        """Return what happened to it last, for errors."""
        return self.rule.story(self.name, last=12)

    # ---- refusals --------------------------------------------------------------------------------------------------

    def check_round(self, worker: int, round: int, objection: str) -> None:
        """Refuse a push: for the rule's objection, or because the worker's last push is not answered yet.

        The rule regards a push as answered when its cohort is complete; a sink may answer later.

        Raises:
            ProtocolError: with the reason.
            RemoteError: an earlier update failed.
        """
        if objection or self.broken is not None:
            self.raise_for(objection)
        if worker in self.pending and round > self.rule.pushed[worker]:
            raise ProtocolError(f"round {round} of worker {worker} came before round {round - 1} was answered")

    def raise_for(self, objection: str = "") -> None:
        """Raise the error for a request that the slot refuses.

        Raises:
            ProtocolError: the objection.
            RemoteError: an earlier update failed.
        """
        if objection:
            raise ProtocolError(f"{objection}\n{self.story()}")
        if self.broken is not None:
            raise RemoteError(str(self.broken))

    def break_for(self, error: Exception) -> None:
        """Give the workers that wait an error, and take no push any more: a round would go on without a part of it."""
        logger.error("the update of %s failed", self.name, exc_info=error)
        why = f"the update of {self.name} failed: {described(error)}\n{self.story()}"
        self.broken = RemoteError(why)
        for request in self.pending.values():
            request.asker.fail(self.broken)
        self.pending.clear()

    # ---- cutting and joining ---------------------------------------------------------------------------------------

    def split(self, at: int) -> tuple[Slot, Slot]:
        """Return both halves of the slot, which go on where it stands; a push that waits for it waits for both."""
        span, middle = self.span, self.span.start + at
        updaters, clippings = self.updater.split(at), self.clipping.split(middle)
        halves = []
        for number, half in enumerate((span.part(span.start, middle), span.part(middle, span.stop))):
            rule = self.rule.copy() if number else self.rule
            readers = self.readers.within(half.start - span.start, half.stop - span.start)
            pending = dict(self.pending)
            halves.append(Slot(half, rule, updaters[number], {}, pending, self.broken, readers, clippings[number]))
        left, right = halves
        for number, accumulator in self.cohorts.items():
            left.cohorts[number], right.cohorts[number] = accumulator.split(at)
        for request in self.pending.values():
            request.unreleased += 1
        return left, right

    def stands_like(self, right: Slot) -> bool:
        """Tell whether the slot and its right neighbour can be one: both are idle, and stand alike."""
        return (
            not (self._is_busy or right._is_busy)
            and self.rule.is_like(right.rule)
            and self.readers.stand_like(right.readers)
            and self.clipping.stands_like(right.clipping)
        )

    @property
    def _is_busy(self) -> bool:
        return bool(self.cohorts or self.pending or self.broken is not None or self.clipping.is_busy)

    def joined(self, right: Slot, updater: FlatUpdater) -> Slot:
        """Return the slot and its right neighbour as one."""
        self.rule.join(right.rule)
        at = self.span.length
        span = m.Span(*self.span.place, self.span.start, at + right.span.length)
        readers, clipping = self.readers.beside(right.readers, at), self.clipping.beside(right.clipping)
        return Slot(span, self.rule, updater, readers=readers, clipping=clipping)


class StoredBucket:
    """The values of one bucket."""

    def __init__(
        self,
        values: torch.Tensor,
        pieces: Sequence[Piece],
        rule: Rule,
        updater: FlatUpdater,
        place: tuple[int, int] = (0, 0),
    ) -> None:
        self.place = place
        self.values = values
        self.pieces = tuple(pieces)
        whole = m.Span(*place, 0, values.numel())
        self._slots = IntervalMap(whole.length, Slot(whole, rule, updater))
        self.slots: Sequence[Slot] = self._slots.values
        """All slots, in order."""
        self.answers: RowAnswers | None = None
        """Answers to pushes of rows; such a bucket is pushed and read as a whole."""
        self.arenas: dict[int, MappedArena] = {}
        """Shared memory of workers on this host."""
        self.snapshots: dict[int, torch.Tensor] = {}
        """Known values of each unit of readers, where they differ from the values: groups that run at different paces,
        and all readers of a store that compresses pulls. A group of one worker sees the values as they are."""
        self._is_coded = False
        """Whether the store compresses pulls: then each unit has known values."""

    def is_edge(self, position: int) -> bool:
        """Tell whether a key, or its part here, begins or ends at a position."""
        return any(position in (one.start, one.start + one.length) for one in self.pieces)

    def slots_over(self, span: m.Span) -> Sequence[Slot]:
        """Return the slots that overlap a range, whole, for a request that only asks: no slot is cut."""
        return self.slots if span.length == self._slots.length else self._slots.touched(span.start, span.stop)

    def cut(self, span: m.Span) -> Sequence[Slot]:
        """Return the slots that make up a range, for a push that is accepted.

        Slots are cut where the range begins and ends, and neighbours inside of it that stand alike are joined.
        """
        if len(self.slots) == 1 and span.length == self._slots.length:
            return self.slots
        start, stop = span.start, span.stop
        slots = self._slots.cut(start, stop, Slot.split)
        if len(slots) == 1:
            return slots
        self._slots.join(start, stop, self._joined)
        return self._slots.touched(start, stop)

    def _joined(self, left: Slot, right: Slot) -> Slot | None:
        if not left.stands_like(right):
            return None
        start, stop = left.span.start, right.span.stop
        pieces = [part for piece in self.pieces if (part := piece.within(start, stop))]
        updater = left.updater.join(right.updater, self.values[start:stop], pieces)
        return None if updater is None else left.joined(right, updater)

    def keep_first_version(self, units: Iterable[int], is_coded: bool = False) -> None:
        """Keep the values as some units will read them until their own first updates."""
        self._is_coded |= is_coded
        for unit in units:
            if unit not in self.snapshots:
                self.snapshots[unit] = self.values.clone()

    def regroup(self, worker: int, units: Units) -> None:
        """Let a worker that has changed its unit read the values as they are now, and forget units without workers."""
        unit = units.of[worker]
        if self._is_coded or not units.is_alone(unit):
            self.snapshots[unit] = self.values.clone()  # not in place: others of the unit may be reading it
        self.snapshots = {unit: known for unit, known in self.snapshots.items() if unit in units.of}
        for slot in self.slots:
            slot.readers.regroup(worker, units.of)

    def keep_known_apart(self, make: Callable[[torch.Tensor, Sequence[Piece]], FlatUpdater]) -> None:
        """Leave the memory to the values that the one unit of readers knows, and go on with values elsewhere."""
        unit = self.slots[0].rule.unit[0]
        if unit in self.snapshots:
            return
        self.snapshots[unit], self.values = self.values, self.values.clone()
        for slot in self.slots:
            before, slot.updater = slot.updater, make(self.values[slot.range], slot.updater.pieces)
            for piece in before.pieces:
                slot.updater.load_state(piece, before.state(piece))

    def overwrite(self, span: m.Span, new: torch.Tensor) -> None:
        """Set the values of a range for all readers."""
        for known in (self.values, *self.snapshots.values()):
            known[span.start : span.stop].copy_(new)
        if self.answers is not None:
            self.answers.overwritten()
        for slot in self.slots_over(span):
            part, start = slot.span.part(span.start, span.stop), slot.span.start
            slot.updater.value_was_set(part.start - start, part.stop - start)
            for unit in self.snapshots:
                slot.readers.jump(unit)

    def gradients(self, worker: int, span: m.Span) -> torch.Tensor:
        """Return a worker's gradients of a range, in its shared memory, which is mapped."""
        grads = self.arenas[worker].grads
        return grads if span.length == self._slots.length else grads[span.start : span.stop]

    # ---- readers ---------------------------------------------------------------------------------------------------

    def read(self, worker: int, span: m.Span) -> torch.Tensor:
        """Note that a worker reads a range now; returns the values, not to be changed."""
        for slot in self.slots_over(span):
            slot.readers.read(slot.rule, worker, slot.span, span)
        return self.visible(slot.rule.unit[worker])[span.start : span.stop]

    def visible(self, unit: int) -> torch.Tensor:
        """Return the values that the workers of a unit see."""
        return self.snapshots.get(unit, self.values)

    def advance(self, slot: Slot, unit: int, codec: Codec | None, waiting: Iterable[int]) -> Bytes | None:
        """Let a unit of readers see a slot as it is now, where it does not read the values themselves.

        Returns:
            The encoded difference to the values that they saw before, if there is a codec and somebody can use it.
        """
        if unit not in self.snapshots:
            return None
        known, values = (one[slot.range] for one in (self.snapshots[unit], self.values))
        if codec is not None:
            return slot.readers.move(unit, known, values, codec, waiting)
        known.copy_(values)
        return None

    def catch_up(self, worker: int, span: m.Span) -> None:
        """Let a worker that is its own unit see the values of a range as they are, before it reads them."""
        for slot in self.slots_over(span):
            unit, part = slot.rule.unit[worker], slot.span.part(span.start, span.stop)
            if unit in self.snapshots:
                self.snapshots[unit][part.start : part.stop].copy_(self.values[part.start : part.stop])
                slot.readers.catch_up(worker, unit)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def release(self, slot: Slot, request: PushRequest, payload: Bytes | None = None) -> None:
        """Add a slot's part of the answer to a push, and release the push.

        Args:
            slot: slot of this bucket; it has done its part of the push.
            request: the push.
            payload: the last difference of the known values, encoded, in a store that compresses pulls: enough for
                workers that know the version before.
        """
        worker, readers, span = request.worker, slot.readers, slot.span
        unit = slot.rule.units.of[worker]
        if request.want and request.shared:
            self.show(worker, unit, span)
        if request.known is not None and self.answers is None:
            coded = readers.tell(worker, unit) and payload is not None and not request.shared
            request.known.append(self._told(slot, unit, span, request.shared, payload if coded else None))
        if readers.absent:
            for start, stop in readers.absent.get(worker, ()):
                request.absent.add(span.part(span.start + start, span.start + stop))
        notes = readers.notes
        request.notes = notes if request.notes is None else [note for note in request.notes if note in notes]
        request.release()

    def show(self, worker: int, unit: int, span: m.Span) -> None:
        """Write values, as a worker's unit sees them, into the worker's arena, unless the worker maps ours."""
        known = self.arenas[worker].values
        if known is not None:
            part = slice(span.start, span.stop)
            known[part].copy_(self.visible(unit)[part])

    def tell_range(self, worker: int, span: m.Span, shared: bool) -> list[Known]:
        """Note that a worker is told how it sees a range, slot by slot; if ``shared``, its memory has the values."""
        found = []
        for slot in self.slots_over(span):
            unit, part = slot.rule.unit[worker], slot.span.part(span.start, span.stop)
            slot.readers.tell_part(worker, unit, slot.span, part)
            found.append(self._told(slot, unit, part, shared, None))
        return found

    def _told(self, slot: Slot, unit: int, span: m.Span, shared: bool, payload: Bytes | None) -> Known:
        version = slot.readers.version(unit)
        known = m.KnownRange(*self.place, span.start, span.length, version, payload is not None)
        if shared or payload is not None:
            return known, payload
        return known, to_frame(self.visible(unit)[span.start : span.stop].clone())
