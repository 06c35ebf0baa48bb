"""A range of a bucket that is updated as one."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.consistency import Rule
from paceline.ranges import Ranges, joined, within
from paceline.server.clip_state import Clipping
from paceline.server.merge import Accumulator, Notes
from paceline.server.parts import Parts
from paceline.server.push_request import PushRequest
from paceline.server.readers import Readers
from paceline.updaters import FlatUpdater


@dataclass(eq=False)
class Slot:
    """A range of a bucket with one rule state and one updater.

    A push of a part of a slot cuts it: both halves go on where it stands. Neighbours that stand alike when a push
    covers them are joined. A request that only asks about a part gets the answer of the slot: all its elements have
    the same rule, version and open cohorts. Reads of parts are in :meth:`read` and :meth:`Readers.tell_part`.
    """

    start: int
    """First element in the bucket."""
    length: int
    rule: Rule
    updater: FlatUpdater
    cohorts: dict[int, Accumulator] = field(default_factory=dict)
    pending: dict[int, PushRequest] = field(default_factory=dict)
    """By worker: its push that is not answered."""
    broken: Exception | None = None
    readers: Readers = field(default_factory=Readers)
    """Used in a store that compresses pulls."""
    clipping: Clipping = field(default_factory=Clipping)
    """Used in a store that clips."""
    absent: dict[int, Ranges] = field(default_factory=dict)
    """By worker: for what, in the last update with its push, nobody had a gradient; empty: never yet."""
    notes: Notes = ()
    """Of the pushes that made the last update, where each update is made of a push of every worker."""
    parts_read: Parts = field(default_factory=Parts)
    """What workers have read of the current version, where that is not all."""

    @property
    def stop(self) -> int:
        """First element after the slot."""
        return self.start + self.length

    @property
    def range(self) -> slice:
        """Where the slot lies in the bucket."""
        return slice(self.start, self.start + self.length)

    @property
    def name(self) -> str:
        """The first of its keys, for errors."""
        keys = [repr(piece.key) for piece in self.updater.pieces]
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more keys" if len(keys) > 3 else "")

    def story(self) -> str:
        """Return what happened to it last, for errors."""
        return self.rule.story(self.name, last=12)

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        """Return (start, stop) of what a range of the bucket covers of the slot, in the bucket."""
        return max(start, self.start), min(stop, self.stop)

    def read(self, worker: int, start: int, stop: int) -> int:
        """Note that a worker reads a range of the slot now; returns its version.

        The rule hears of it when the worker has read all of this version, in one part or several: staleness counts
        from the oldest version in what a push was computed from.

        Args:
            worker: who reads.
            start: of the range, in the bucket.
            stop: of the range, in the bucket.
        """
        version, is_part = self.rule.readable(worker), stop - start < self.length
        if is_part and version > self.rule.read[worker]:
            is_part = not self.parts_read.add(worker, version, start - self.start, stop - self.start, self.length)
        return version if is_part else self.rule.pull(worker)

    # ---- cutting and joining ---------------------------------------------------------------------------------------

    def split(self, at: int) -> tuple[Slot, Slot]:
        """Return both halves of the slot, which go on where it stands; who waits for it waits for both."""
        left_updater, right_updater = self.updater.split(at)
        left = Slot(self.start, at, self.rule, left_updater, broken=self.broken)
        right = Slot(self.start + at, self.length - at, self.rule.copy(), right_updater, broken=self.broken)
        for number, accumulator in self.cohorts.items():
            left.cohorts[number], right.cohorts[number] = accumulator.split(at)
        for worker, request in self.pending.items():
            left.pending[worker] = right.pending[worker] = request
            request.waits()
        left.clipping, right.clipping = self.clipping.split(self.start + at)
        for half, start, stop in ((left, 0, at), (right, at, self.length)):
            half.readers = self.readers.within(start, stop)
            half.parts_read = self.parts_read.within(start, stop)
            half.absent = {worker: within(absent, start, stop) for worker, absent in self.absent.items()}
            half.notes = self.notes
        return left, right

    def stands_like(self, right: Slot) -> bool:
        """Tell whether the slot and its right neighbour can be one: nothing is in progress, and both stand alike."""
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
        """Return the slot and its right neighbour as one.

        Args:
            right: stands like this one.
            updater: of both.
        """
        at = self.length
        self.rule.join(right.rule)
        absent = {
            worker: joined([*self.absent.get(worker, ()), *((at + a, at + b) for a, b in right.absent.get(worker, ()))])
            for worker in self.absent.keys() | right.absent.keys()
        }
        return Slot(
            self.start,
            self.length + right.length,
            self.rule,
            updater,
            readers=self.readers.beside(right.readers, at),
            clipping=self.clipping.beside(right.clipping),
            absent=absent,
            notes=[note for note in self.notes if note in right.notes],
            parts_read=self.parts_read.beside(right.parts_read, at),
        )
