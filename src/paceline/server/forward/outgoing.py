"""Sums that are complete at a forwarding server, and the messages that take them to their owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from paceline.net.base import Frames
from paceline.ranges import Ranges, is_all
from paceline.server.bucket import StoredBucket
from paceline.server.merge import Accumulator
from paceline.tensors import to_frame
from paceline.updaters import StepOptions
from paceline.wire import messages as m


@dataclass(frozen=True)
class Sum:
    """A cohort of one slot that is complete at the forwarding server."""

    owner: int
    bucket: StoredBucket
    start: int
    length: int
    accumulator: Accumulator
    """Lends the memory of the values; closed when the owner has answered."""
    values: torch.Tensor
    """Flat [length]."""
    unit: float
    """Values times this are the sum of gradients times their samples, where the store merges to the mean."""
    shares: tuple[tuple[int, float, bool], ...]
    """(worker, samples, whether before the barrier at which it may be waiting)."""
    rounds: tuple[int, ...]
    """Of the workers, in the order of shares."""

    @property
    def options(self) -> StepOptions | None:
        """Of the workers' optimizer; None: unchanged."""
        return self.accumulator.options

    @property
    def absent(self) -> Ranges:
        """Where nobody here had a gradient."""
        return self.accumulator.absent or ()

    @property
    def entry(self) -> m.Entry:
        """The range of the bucket; its round does not count."""
        return m.Entry(*self.bucket.place, self.start, self.length, 0)

    @property
    def frame(self) -> object:
        """The values as a frame; empty when there are none."""
        return b"" if self.absent and is_all(self.absent, self.length) else to_frame(self.values)

    @property
    def message_key(self) -> tuple[object, ...]:
        """Sums that agree in this travel in one message."""
        one = self.accumulator
        return self.owner, self.unit, self.shares, id(one.options), one.skip, one.problem, tuple(one.inputs.items())


def batches(sums: Iterable[Sum]) -> list[list[Sum]]:
    """Return sums in groups that travel in one message each."""
    found: dict[tuple[object, ...], list[Sum]] = {}
    for one in sums:
        found.setdefault(one.message_key, []).append(one)
    return list(found.values())


def message(store: str, sums: Sequence[Sum]) -> tuple[m.PushSum, Frames]:
    """Return the message that takes sums of one batch to their owner, and its frames."""
    first, skip = sums[0], sums[0].accumulator.skip
    inputs = first.accumulator.inputs
    shares = [
        m.Share(*share, [one.rounds[number] for one in sums], inputs.get(share[0]))
        for number, share in enumerate(first.shares)
    ]
    options = b"" if first.options is None else msgspec.msgpack.encode(first.options)
    absent = [m.AbsentRange(*one.bucket.place, one.start + a, b - a) for one in sums for a, b in one.absent]
    entries, problem = [one.entry for one in sums], first.accumulator.problem
    notes = list(dict.fromkeys(note for one in sums for note in one.accumulator.notes))
    body = m.PushSum(store, entries, shares, first.unit, options, absent, skip, problem, notes)
    return body, () if skip else [one.frame for one in sums]
