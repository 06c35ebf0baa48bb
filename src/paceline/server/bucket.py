"""A bucket as its server holds it: the values, and the slots in which they are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.compression import Codec
from paceline.compression.buffers import Bytes
from paceline.consistency import Rule
from paceline.ranges import Ranges, within
from paceline.server.clip_state import Clipping
from paceline.server.merge import Accumulator
from paceline.server.readers import Readers
from paceline.server.row_answers import RowAnswers
from paceline.tensors import to_frame
from paceline.transport.shared import MappedArena
from paceline.updaters import FlatUpdater, Piece
from paceline.wire import messages as m


@dataclass(eq=False)
class Pending:
    """A push that is not answered yet."""

    worker: int
    want: bool
    shared: bool
    finish: Callable[[Pending], None]
    """Called with this when the last slot has released the worker."""
    fail: Callable[[Exception], None]
    told: list[tuple[m.Told, Any]] = field(default_factory=list)
    """What the answer brings, with its frames, in a store that compresses pulls."""
    absent: set[tuple[int, int, int, int]] = field(default_factory=set)
    """(block, bucket, start, length) of what the answer says that nobody had a gradient for."""
    remaining: int = 0
    """Slots that have not released the worker; one that broke never does, so that ``finish`` is not called."""
    failed: bool = False

    def break_off(self, error: Exception) -> None:
        """Answer with an error, once."""
        if not self.failed:
            self.failed = True
            self.fail(error)


@dataclass(eq=False)
class Slot:
    """A stretch of a bucket that has been pushed as one so far: one rule, one updater."""

    start: int
    length: int
    rule: Rule
    updater: FlatUpdater
    cohorts: dict[int, Accumulator] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    broken: Exception | None = None
    readers: Readers = field(default_factory=Readers)
    """Used in a store that compresses pulls."""
    clipping: Clipping = field(default_factory=Clipping)
    """Used in a store that clips."""
    absent: dict[int, Ranges] = field(default_factory=dict)
    """By worker: for what, in the last update with its push, nobody had a gradient; empty: never yet."""

    @property
    def stop(self) -> int:
        """First element after the slot."""
        return self.start + self.length

    @property
    def name(self) -> str:
        """The first of its keys, for errors."""
        keys = [repr(piece.key) for piece in self.updater.pieces]
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more keys" if len(keys) > 3 else "")

    def story(self) -> str:
        """Return what happened to it last, for errors."""
        return self.rule.story(self.name, last=12)


class StoredBucket:
    """The values of one bucket.

    Args:
        values: flat, owned by the bucket.
        pieces: which keys lie where.
        rule: of the whole bucket, at its start.
        updater: of the whole bucket.
        place: number of its block, and its index there.
    """

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
        self.slots = [Slot(0, values.numel(), rule, updater)]
        self.answers: RowAnswers | None = None
        """What answers to pushes of rows bring; such a bucket is pushed and read as a whole."""
        self.arenas: dict[int, MappedArena] = {}
        """Shared memory of workers on this host."""
        self.snapshots: dict[int, torch.Tensor] = {}
        """What each unit of readers knows, where that differs from the values: groups that run at different paces, and
        all readers of a store that compresses pulls."""

    def in_range(self, start: int, length: int) -> bool:
        """Tell whether a stretch lies inside."""
        return start >= 0 and start + length <= self.values.numel() and (length > 0 or self.values.numel() == 0)

    def is_edge(self, position: int) -> bool:
        """Tell whether a key, or what lies here of it, begins or ends at a position."""
        return any(position in (one.start, one.start + one.length) for one in self.pieces)

    def slots_of(self, start: int, length: int) -> list[Slot]:
        """Return the slots that make up a stretch, after cutting at its ends."""
        if start == 0 and length == self.values.numel():
            return self.slots
        self._cut_at(start)
        self._cut_at(start + length)
        return [slot for slot in self.slots if start <= slot.start and slot.stop <= start + length]

    def _cut_at(self, position: int) -> None:
        for index, slot in enumerate(self.slots):
            if slot.start < position < slot.stop:
                self.slots[index : index + 1] = _split(slot, position - slot.start)
                return

    def keep_first_version(self, units: Iterable[int]) -> None:
        """Keep the values as every unit will read them until its own first update."""
        for unit in units:
            if unit not in self.snapshots:
                self.snapshots[unit] = self.values.clone()

    def keep_known_apart(self, make: Callable[[torch.Tensor, Sequence[Piece]], FlatUpdater]) -> None:
        """Leave the memory of the values to what the one unit of readers knows, and go on with values elsewhere.

        Args:
            make: makes an updater of new values; it gets the state of the one before.
        """
        unit = self.slots[0].rule.unit[0]
        if unit in self.snapshots:
            return
        self.snapshots[unit], self.values = self.values, self.values.clone()
        for slot in self.slots:
            before, slot.updater = slot.updater, make(self.values[slot.start : slot.stop], slot.updater.pieces)
            for piece in before.pieces:
                slot.updater.load_state(piece, before.state(piece))

    def overwrite(self, start: int, new: torch.Tensor) -> None:
        """Set values for all readers, from a position on."""
        stop = start + new.numel()
        for known in (self.values, *self.snapshots.values()):
            known[start:stop].copy_(new)
        if self.answers is not None:
            self.answers.overwritten()
        for slot in self.slots:
            first, last = max(start, slot.start), min(stop, slot.stop)
            if first < last:
                slot.updater.value_was_set(first - slot.start, last - slot.start)
                for unit in self.snapshots:
                    slot.readers.jump(unit)

    def visible(self, unit: int) -> torch.Tensor:
        """Return the values that the workers of a unit see."""
        return self.snapshots.get(unit, self.values)

    def advance(self, slot: Slot, unit: int, codec: Codec | None, waiting: Iterable[int]) -> Bytes | None:
        """Let a unit of readers see a slot as it is now, where it does not read the values themselves.

        Args:
            slot: of this bucket.
            unit: the readers.
            codec: of the pull leg, if that is compressed.
            waiting: those of them that are told at once.

        Returns:
            The encoded difference to what they saw before, if there is a codec and somebody can use it.
        """
        if unit not in self.snapshots:
            return None
        known, values = (one[slot.start : slot.stop] for one in (self.snapshots[unit], self.values))
        if codec is not None:
            return slot.readers.move(unit, known, values, codec, waiting)
        known.copy_(values)
        return None

    def tell(self, slot: Slot, worker: int, shared: bool, payload: Bytes | None = None) -> tuple[m.Told, Any]:
        """Note that a worker is told how it sees a slot; returns the words and the frame for them.

        Args:
            slot: of this bucket.
            worker: who is told.
            shared: the values were written to its memory, so that no frame is needed.
            payload: the last difference, encoded: enough for those who know what was before.
        """
        unit = slot.rule.unit[worker]
        coded = slot.readers.tell(worker, unit) and payload is not None and not shared
        told = m.Told(*self.place, slot.start, slot.length, slot.readers.version(unit), coded)
        if shared:
            return told, None
        return told, payload if coded else to_frame(self.visible(unit)[slot.start : slot.stop].clone())


def _split(slot: Slot, at: int) -> list[Slot]:
    """Cut a slot in two that go on where it stands; who waits for it waits for both."""
    left_updater, right_updater = slot.updater.split(at)
    left_readers, right_readers = slot.readers.halves()
    left = Slot(slot.start, at, slot.rule, left_updater, broken=slot.broken, readers=left_readers)
    right = Slot(
        slot.start + at, slot.length - at, slot.rule.copy(), right_updater, broken=slot.broken, readers=right_readers
    )
    for number, accumulator in slot.cohorts.items():
        left.cohorts[number], right.cohorts[number] = accumulator.split(at)
    for worker, pending in slot.pending.items():
        left.pending[worker] = right.pending[worker] = pending
        pending.remaining += 1
    left.clipping, right.clipping = slot.clipping.halves(at)
    for worker, absent in slot.absent.items():
        left.absent[worker], right.absent[worker] = within(absent, 0, at), within(absent, at, slot.length)
    return [left, right]
