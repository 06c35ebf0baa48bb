"""The pull leg: what those who read a slot know of its values, and what an answer has to tell them.

Workers that always read the same version are one *unit* of readers: all of them, a group, or a single worker. For each
unit the server keeps the values as the unit knows them; an update moves those by what a codec makes of the difference,
and the same bytes move the copy of every worker in the unit. What a codec leaves out stays in the difference, so no
residual is needed (error feedback both ways: DoubleSqueeze, Tang et al. 2019; Philippenko and Dieuleveut 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.compression import Codec, CodecState
from paceline.compression.buffers import Bytes
from paceline.server.parts import Parts


@dataclass(eq=False)
class Readers:
    """How far the readers of one slot have come."""

    versions: dict[int, int] = field(default_factory=dict)
    """How often what a unit knows has moved."""
    holds: dict[int, int] = field(default_factory=dict)
    """The version that a worker was told last."""
    states: dict[int, CodecState] = field(default_factory=dict)
    """What the codec remembers, by unit."""

    parts: Parts = field(default_factory=Parts)
    """What workers were told of the current version, where that is not all."""

    def within(self, start: int, stop: int) -> Readers:
        """Return the readers of a part of a slot that is cut; what codecs remember is forgotten."""
        return Readers(dict(self.versions), dict(self.holds), parts=self.parts.within(start, stop))

    def stand_like(self, right: Readers) -> bool:
        """Tell whether the readers of a neighbour have come as far."""
        return self.versions == right.versions and self.holds == right.holds

    def beside(self, right: Readers, at: int) -> Readers:
        """Return the readers of this slot and of one that begins ``at`` elements later and has come as far."""
        return Readers(self.versions, self.holds, parts=self.parts.beside(right.parts, at))

    def regroup(self, worker: int, units: Sequence[int]) -> None:
        """Note that a worker has changed its unit: its next answer, and its mates', brings the values as they are."""
        self.holds.pop(worker, None)
        self.jump(units[worker])
        self.versions = {unit: version for unit, version in self.versions.items() if unit in units}
        self.states = {unit: state for unit, state in self.states.items() if unit in units}

    def version(self, unit: int) -> int:
        """Return how often what a unit knows has moved."""
        return self.versions.get(unit, 0)

    def jump(self, unit: int) -> None:
        """Note that what a unit knows has moved by no difference: the next answer brings the values as they are."""
        self.versions[unit] = self.version(unit) + 1

    def catch_up(self, worker: int, unit: int) -> None:
        """Note that what the only worker of a unit knows moves by what it reads next, be that a part of the slot.

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

    def tell_part(self, worker: int, unit: int, start: int, stop: int, length: int) -> None:
        """Note that a worker is told a part of the unit's version.

        It holds that version when it was told all parts of it. Until then the next answer brings the values as they
        are: a difference fits only where all of the slot is known.

        Args:
            worker: who is told.
            unit: of the worker.
            start: of the part, in the slot.
            stop: of the part, in the slot.
            length: of the slot.
        """
        version = self.version(unit)
        if self.holds.get(worker) != version and self.parts.add(worker, version, start, stop, length):
            self.holds[worker] = version

    def move(
        self, unit: int, known: torch.Tensor, values: torch.Tensor, codec: Codec, waiting: Iterable[int]
    ) -> Bytes | None:
        """Move what a unit knows towards the values.

        Args:
            unit: of readers.
            known: flat float32 values as the unit knows them, changed in place.
            values: flat float32 values as they are.
            codec: of the pull leg.
            waiting: workers of the unit that are told of this move at once.

        Returns:
            The encoded difference; None when nobody could use it, or nobody should: differences that are not finite are
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
        """Encode without a residual from last time: what was not sent then is in the difference already."""
        numel = difference.numel()
        if unit not in self.states:
            self.states[unit] = codec.new_state(numel)
        state = self.states[unit]
        state.residual = torch.zeros(numel) if codec.uses_residual else None
        payload = codec.encode(difference, state, round=round)
        state.residual = None
        return payload
