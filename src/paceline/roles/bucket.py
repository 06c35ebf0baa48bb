"""A bucket as its server holds it: the values, and the slots in which they are updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.consistency import Rule
from paceline.roles.accumulate import Accumulator
from paceline.transport.shared import MappedArena
from paceline.updaters import FlatUpdater, Piece


@dataclass(eq=False)
class Pending:
    """A push that is not answered yet."""

    worker: int
    want: bool
    shared: bool
    finish: Callable[[], None]
    """Called when the last slot has released the worker."""
    fail: Callable[[Exception], None]
    remaining: int = 0
    """Slots that have not released the worker; one that broke never does, so that ``finish`` is not called."""


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

    @property
    def stop(self) -> int:
        """First element after the slot."""
        return self.start + self.length


class StoredBucket:
    """The values of one bucket.

    Args:
        values: flat, owned by the bucket.
        pieces: which keys lie where.
        rule: of the whole bucket, at its start.
        updater: of the whole bucket.
    """

    def __init__(self, values: torch.Tensor, pieces: Sequence[Piece], rule: Rule, updater: FlatUpdater) -> None:
        self.values = values
        self.pieces = tuple(pieces)
        self.slots = [Slot(0, values.numel(), rule, updater)]
        self.arenas: dict[int, MappedArena] = {}
        """Shared memory of workers on this host."""
        self.snapshots: dict[int, torch.Tensor] = {}
        """What each group read last, where groups run at different paces."""
        self._buffers: dict[int, torch.Tensor] = {}

    def in_range(self, start: int, length: int) -> bool:
        """Tell whether a stretch lies inside."""
        return start >= 0 and start + length <= self.values.numel() and (length > 0 or self.values.numel() == 0)

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

    def buffer(self, slot: Slot, unit: int, dtype: torch.dtype) -> torch.Tensor:
        """Return where the pushes of a unit of workers are summed; kept, because memory that is warm is fast."""
        whole = self._buffers.get(unit)
        if whole is None or whole.dtype != dtype:
            whole = self._buffers[unit] = torch.empty(self.values.numel(), dtype=dtype)
        return whole[slot.start : slot.stop]

    def keep_first_version(self, units: Sequence[int]) -> None:
        """Keep the values as every group will read them until its own first update."""
        for unit in units:
            if unit not in self.snapshots:
                self.snapshots[unit] = self.values.clone()

    def visible(self, unit: int) -> torch.Tensor:
        """Return the values that the workers of a unit see."""
        return self.snapshots.get(unit, self.values)


def _split(slot: Slot, at: int) -> list[Slot]:
    """Cut a slot in two that go on where it stands; who waits for it waits for both."""
    left_updater, right_updater = slot.updater.split(at)
    left = Slot(slot.start, at, slot.rule, left_updater, broken=slot.broken)
    right = Slot(slot.start + at, slot.length - at, slot.rule.copy(), right_updater, broken=slot.broken)
    for number, accumulator in slot.cohorts.items():
        left.cohorts[number], right.cohorts[number] = accumulator.split(at)
    for worker, pending in slot.pending.items():
        left.pending[worker] = right.pending[worker] = pending
        pending.remaining += 1
    return [left, right]
