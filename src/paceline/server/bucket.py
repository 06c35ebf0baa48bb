"""A bucket as its server holds it: the values, and the slots in which they are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from paceline.compression import Codec
from paceline.compression.buffers import Bytes
from paceline.consistency import Rule, Units
from paceline.interval_map import IntervalMap
from paceline.net.memory import MappedArena
from paceline.server.push_request import Known
from paceline.server.row_answers import RowAnswers
from paceline.server.slot import Slot
from paceline.tensors import to_frame
from paceline.updaters import FlatUpdater, Piece
from paceline.wire import messages as m

__all__ = ["Slot", "StoredBucket"]


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
        self._slots = IntervalMap(values.numel(), Slot(0, values.numel(), rule, updater))
        self.answers: RowAnswers | None = None
        """What answers to pushes of rows bring; such a bucket is pushed and read as a whole."""
        self.arenas: dict[int, MappedArena] = {}
        """Shared memory of workers on this host."""
        self.snapshots: dict[int, torch.Tensor] = {}
        """What each unit of readers knows, where that differs from the values: groups that run at different paces, and
        all readers of a store that compresses pulls. A group of one worker sees the values as they are."""
        self._is_coded = False
        """Whether the store compresses pulls: then each unit has what it knows."""

    def in_range(self, start: int, length: int) -> bool:
        """Tell whether a range lies inside."""
        return start >= 0 and start + length <= self.values.numel() and (length > 0 or self.values.numel() == 0)

    def is_edge(self, position: int) -> bool:
        """Tell whether a key, or what lies here of it, begins or ends at a position."""
        return any(position in (one.start, one.start + one.length) for one in self.pieces)

    @property
    def slots(self) -> list[Slot]:
        """All slots, in order."""
        return self._slots.values

    def slots_over(self, start: int, length: int) -> list[Slot]:
        """Return the slots that overlap a range, whole, for a request that only asks: nothing is cut."""
        return self.slots if length == self._slots.length else self._slots.touched(start, start + length)

    def cut(self, start: int, length: int) -> list[Slot]:
        """Return the slots that make up a range, for a push that is accepted.

        Slots are cut where the range begins and ends, and neighbours inside of it that stand alike are joined.
        """
        if length == self._slots.length and len(self._slots) == 1:
            return self.slots
        stop = start + length
        slots = self._slots.cut(start, stop, Slot.split)
        if len(slots) == 1:
            return slots
        self._slots.join(start, stop, self._joined)
        return self._slots.touched(start, stop)

    def _joined(self, left: Slot, right: Slot) -> Slot | None:
        if not left.stands_like(right):
            return None
        start, stop = left.start, right.stop
        pieces = [part for piece in self.pieces if (part := piece.within(start, stop))]
        updater = left.updater.join(right.updater, self.values[start:stop], pieces)
        return None if updater is None else left.joined(right, updater)

    def keep_first_version(self, units: Iterable[int], is_coded: bool = False) -> None:
        """Keep the values as some units will read them until their own first updates.

        Args:
            units: of readers.
            is_coded: the store compresses pulls.
        """
        self._is_coded |= is_coded
        for unit in units:
            if unit not in self.snapshots:
                self.snapshots[unit] = self.values.clone()

    def regroup(self, worker: int, units: Units) -> None:
        """Let a worker that has changed its unit read the values as they are now, and forget units without workers.

        Args:
            worker: who has changed its unit.
            units: as they are now.
        """
        unit = units.of[worker]
        if self._is_coded or not units.is_alone(unit):
            self.snapshots[unit] = self.values.clone()  # not in place: others of the unit may be reading it
        self.snapshots = {unit: known for unit, known in self.snapshots.items() if unit in units.of}
        for slot in self.slots:
            slot.readers.regroup(worker, units.of)

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
        for slot in self.slots_over(start, new.numel()):
            first, last = slot.clip(start, stop)
            slot.updater.value_was_set(first - slot.start, last - slot.start)
            for unit in self.snapshots:
                slot.readers.jump(unit)

    # ---- readers ---------------------------------------------------------------------------------------------------

    def read(self, worker: int, start: int, length: int) -> int:
        """Note that a worker reads a range now; returns the oldest version in it."""
        stop = start + length
        return min(slot.read(worker, *slot.clip(start, stop)) for slot in self.slots_over(start, length))

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
        known, values = (one[slot.range] for one in (self.snapshots[unit], self.values))
        if codec is not None:
            return slot.readers.move(unit, known, values, codec, waiting)
        known.copy_(values)
        return None

    def catch_up(self, worker: int, start: int, length: int) -> None:
        """Let a worker that is its own unit see the values of a range as they are, before it reads them."""
        for slot in self.slots_over(start, length):
            unit, (first, last) = slot.rule.unit[worker], slot.clip(start, start + length)
            if unit in self.snapshots:
                self.snapshots[unit][first:last].copy_(self.values[first:last])
                slot.readers.catch_up(worker, unit)

    def tell(self, slot: Slot, worker: int, shared: bool, payload: Bytes | None = None) -> Known:
        """Note that a worker is told how it sees a slot; returns the words and the frame for them.

        Args:
            slot: of this bucket.
            worker: who is told.
            shared: the values were written to its memory, so that no frame is needed.
            payload: the last difference, encoded: enough for those who know what was before.
        """
        unit = slot.rule.unit[worker]
        coded = slot.readers.tell(worker, unit) and payload is not None and not shared
        return self._told(slot, unit, slot.start, slot.stop, shared, payload if coded else None)

    def tell_range(self, worker: int, start: int, length: int, shared: bool) -> list[Known]:
        """Note that a worker is told how it sees a range, slot by slot; of slots that overlap it, the part inside."""
        found = []
        for slot in self.slots_over(start, length):
            unit, (first, last) = slot.rule.unit[worker], slot.clip(start, start + length)
            slot.readers.tell_part(worker, unit, first - slot.start, last - slot.start, slot.length)
            found.append(self._told(slot, unit, first, last, shared, None))
        return found

    def _told(self, slot: Slot, unit: int, start: int, stop: int, shared: bool, payload: Bytes | None) -> Known:
        known = m.KnownRange(*self.place, start, stop - start, slot.readers.version(unit), payload is not None)
        if shared or payload is not None:
            return known, payload
        return known, to_frame(self.visible(unit)[start:stop].clone())
