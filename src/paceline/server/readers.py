"""The readers of a slot: the versions that they have read, and the content of answers to them.

The rule counts the version of a slot that a worker has read as a whole. Workers may read a slot part by part, key by
key: then they have read it when all parts are read at one version. Until then it counts as not read, so that a push is
never taken for fresher than it is.

In a store that compresses pulls, workers that always read the same version are one *unit* of readers: all of them, a
group, or a single worker. For each unit the server keeps the values as the unit knows them; an update moves those by
the difference as a codec encodes it, and the same bytes move the copy of every worker in the unit. The part that a
codec leaves out stays in the difference, so no residual is needed (error feedback both ways: DoubleSqueeze, Tang et al.
2019; Philippenko and Dieuleveut 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.compression import Codec, CodecState
from paceline.compression.buffers import Bytes
from paceline.consistency import Rule
from paceline.layout.ranges import Ranges, is_all, joined, within
from paceline.server.merge import Notes
from paceline.wire import messages as m


class Parts:
    """For each worker, the parts that it has seen at one version."""

    def __init__(self, seen: Mapping[int, tuple[int, Ranges]] | None = None) -> None:
        self._seen = dict(seen or {})

    def add(self, worker: int, version: int, start: int, stop: int, length: int) -> bool:
        """Note that a worker sees a part; returns whether it has now seen all ``length`` elements at this version."""
        last, parts = self._seen.pop(worker, (version, ()))
        parts = joined([*(parts if last == version else ()), (start, stop)])
        if length == 0 or is_all(parts, length):
            return True
        self._seen[worker] = version, parts
        return False

    def forget(self, worker: int) -> None:
        """Forget the parts that a worker has seen."""
        self._seen.pop(worker, None)

    def within(self, start: int, stop: int) -> Parts:
        """Return the parts in ``[start, stop)``, counted from ``start``."""
        return Parts({worker: (version, within(parts, start, stop)) for worker, (version, parts) in self._seen.items()})

    def beside(self, right: Parts, at: int) -> Parts:
        """Return these parts and those of a right neighbour that begins ``at`` elements after this slot."""
        seen = dict(self._seen)
        for worker, (version, parts) in right._seen.items():
            last, before = seen.get(worker, (version, ()))
            moved = joined([*(before if last == version else ()), *((at + a, at + b) for a, b in parts)])
            if last <= version:
                seen[worker] = version, moved
        return Parts(seen)


@dataclass(eq=False)
class Readers:
    """How far the readers of one slot have come."""

    parts: Parts = field(default_factory=Parts)
    """Parts of the rule's version that workers have read, where these are not all."""
    absent: dict[int, Ranges] = field(default_factory=dict)
    """By worker: ranges without any gradient in the last update with its push; empty: never yet."""
    notes: Notes = ()
    """Notes of the pushes that made the last update, where each update is made of a push of every worker."""

    # The rest is used in a store that compresses pulls.
    versions: dict[int, int] = field(default_factory=dict)
    """How often a unit's known values have moved."""
    holds: dict[int, int] = field(default_factory=dict)
    """The version that a worker was told last."""
    told: Parts = field(default_factory=Parts)
    """Parts of their unit's known version that workers were told, where these are not all."""
    states: dict[int, CodecState] = field(default_factory=dict)
    """State of the codec, by unit."""

    def within(self, start: int, stop: int) -> Readers:
        """Return the readers of a part of a slot that is cut; the states of codecs are forgotten."""
        return Readers(
            self.parts.within(start, stop),
            {worker: within(absent, start, stop) for worker, absent in self.absent.items()},
            self.notes,
            dict(self.versions),
            dict(self.holds),
            self.told.within(start, stop),
        )

    def stand_like(self, right: Readers) -> bool:
        """Tell whether the readers of a neighbour have come as far."""
        return self.versions == right.versions and self.holds == right.holds

    def beside(self, right: Readers, at: int) -> Readers:
        """Return the readers of this slot and of one that begins ``at`` elements later and has come as far."""
        absent = {
            worker: joined([*self.absent.get(worker, ()), *((at + a, at + b) for a, b in right.absent.get(worker, ()))])
            for worker in self.absent.keys() | right.absent.keys()
        }
        notes = [note for note in self.notes if note in right.notes]
        parts, told = self.parts.beside(right.parts, at), self.told.beside(right.told, at)
        return Readers(parts, absent, notes, self.versions, self.holds, told)

    def read(self, rule: Rule, worker: int, slot: m.Span, span: m.Span) -> None:
        """Note that a worker reads a range now that overlaps the slot.

        The rule hears of it when the worker has read all of this version, in one part or several: staleness counts
        from the oldest version that a push was computed from.
        """
        if span.start <= slot.start and span.start + span.length >= slot.start + slot.length:
            rule.pull(worker)
            return
        version, part = rule.readable(worker), slot.part(span.start, span.stop)
        if version > rule.read[worker]:
            start, stop = part.start - slot.start, part.stop - slot.start
            if self.parts.add(worker, version, start, stop, slot.length):
                rule.pull(worker)

    # ---- compressed pulls ------------------------------------------------------------------------------------------

    def regroup(self, worker: int, units: Sequence[int]) -> None:
        """Note that a worker has changed its unit: the next answers to the unit bring the values as they are."""
        self.holds.pop(worker, None)
        self.jump(units[worker])
        self.versions = {unit: version for unit, version in self.versions.items() if unit in units}
        self.states = {unit: state for unit, state in self.states.items() if unit in units}

    def forget(self, worker: int) -> None:
        """Forget what a worker has read: another process takes its place."""
        self.parts.forget(worker)
        self.told.forget(worker)
        self.holds.pop(worker, None)
        self.absent.pop(worker, None)

    def version(self, unit: int) -> int:
        """Return how often a unit's known values have moved."""
        return self.versions.get(unit, 0)

    def jump(self, unit: int) -> None:
        """Note that a unit's known values moved without a difference: the next answer brings the values as they are."""
        self.versions[unit] = self.version(unit) + 1

    def catch_up(self, worker: int, unit: int) -> None:
        """Note that the next read of a unit's only worker moves its known values, even if it reads a part of the slot.

        Reading the other parts next moves nothing more: the version is then the same for all of them.
        """
        if self.holds.get(worker) == self.version(unit):
            self.jump(unit)

    def tell(self, worker: int, unit: int) -> bool:
        """Note that a worker is told the unit's version; returns whether the last move is all it lacks."""
        version = self.version(unit)
        lacks_one = self.holds.get(worker) == version - 1
        self.holds[worker] = version
        return lacks_one

    def tell_part(self, worker: int, unit: int, slot: m.Span, part: m.Span) -> None:
        """Note that a worker is told a part of the unit's version.

        It holds that version when it was told all parts of it. Until then the next answer brings the values as they
        are: a difference fits only where all of the slot is known.
        """
        version, start, stop = self.version(unit), part.start - slot.start, part.stop - slot.start
        if self.holds.get(worker) != version and self.told.add(worker, version, start, stop, slot.length):
            self.holds[worker] = version

    def move(
        self, unit: int, known: torch.Tensor, values: torch.Tensor, codec: Codec, waiting: Iterable[int]
    ) -> Bytes | None:
        """Move a unit's known values towards the values.

        Args:
            unit: unit of readers.
            known: flat float32 values as the unit knows them, changed in place.
            values: flat float32 values as they are.
            codec: codec of the pull leg.
            waiting: workers of the unit that are told of this move at once.

        Returns:
            The encoded difference; None when no worker could or should use it: differences that are not finite are
            for no codec, and those who train must see them. Then the unit knows the values as they are.
        """
        before = self.version(unit)
        self.versions[unit] = before + 1
        if any(self.holds.get(worker) == before for worker in waiting):
            difference = values - known
            if bool(difference.sum().isfinite()):
                payload = self._encode(unit, difference, codec, before)
                codec.decode_add(payload, known)
                return payload
        known.copy_(values)
        return None

    def _encode(self, unit: int, difference: torch.Tensor, codec: Codec, round: int) -> Bytes:
        """Encode without a residual from last time: the unsent part is in the difference already."""
        numel = difference.numel()
        if unit not in self.states:
            self.states[unit] = codec.new_state(numel)
        state = self.states[unit]
        state.residual = torch.zeros(numel, dtype=torch.float32, device="cpu") if codec.uses_residual else None
        payload = codec.encode(difference, state, round=round)
        state.residual = None
        return payload
