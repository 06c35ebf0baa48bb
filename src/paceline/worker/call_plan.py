"""Plans of calls on lists of keys: computed once, used in every later call.

A plan is cut into *steps* of a few megabytes, each a message per server. So a worker copies one step's gradients while
the servers work on the previous step's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.layout.local_merge import Route
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock

#: Size at which a step ends, in bytes. It is large enough to hide the cost of a message (about 0.3 ms on both sides),
#: and small enough to send the first step while the others are still copied.
STEP_BYTES = 4 * 1024 * 1024

Place = tuple[WorkerBlock, int]
"""A key: its block, and its index there."""


@dataclass(eq=False)
class CallStep:
    """A part of a call: its keys, their places in the arenas, and their ranges by route."""

    positions: slice
    """Positions of the step's keys in the call."""
    places: list[Place]
    indices: dict[WorkerBlock, list[int]]
    """The same places, by block."""
    values: list[torch.Tensor]
    grads: list[torch.Tensor]
    sends: dict[Route, list[m.Span]]

    def set_fresh(self, fresh: bool) -> None:
        """Note whether the arenas' values are up to date: a pull would bring the same."""
        for block, indices in self.indices.items():
            for index in indices:
                block.fresh[index] = fresh

    def is_fresh(self) -> bool:
        """Return whether the arenas' values of all keys are up to date."""
        return all(all(map(block.fresh.__getitem__, indices)) for block, indices in self.indices.items())


@dataclass(eq=False)
class CallPlan:
    """The steps of a call, and the shapes that its values must have."""

    steps: list[CallStep]
    shapes: list[torch.Size]


def make_plan(places: Sequence[Place]) -> CallPlan:
    """Plan calls on these keys, in this order."""
    steps, start = [], 0
    for stop in _cuts(places):
        steps.append(_step(slice(start, stop), places[start:stop]))
        start = stop
    return CallPlan(steps, [block.value_of(index).shape for block, index in places])


def _cuts(places: Sequence[Place]) -> Iterator[int]:
    """Return the ends of steps: they are large enough there, and no bucket is split."""
    size = 0
    for position, (block, index) in enumerate(places):
        size += block.numel(index) * block.dtype.itemsize
        last = position + 1 == len(places)
        if last or (size >= STEP_BYTES and not _same_bucket(places[position], places[position + 1])):
            yield position + 1
            size = 0


def _same_bucket(one: Place, other: Place) -> bool:
    return one[0] is other[0] and bool(one[0].buckets_of(one[1]) & other[0].buckets_of(other[1]))


def _step(positions: slice, places: Sequence[Place]) -> CallStep:
    by_block: dict[WorkerBlock, list[int]] = {}
    for block, index in places:
        by_block.setdefault(block, []).append(index)
    sends: dict[Route, list[m.Span]] = {}
    for block, indices in by_block.items():
        for part in block.ranges(indices):
            sends.setdefault(block.routes[part.bucket], []).append(part)
    values = [block.value_of(index) for block, index in places]
    grads = [block.grad_of(index) for block, index in places]
    return CallStep(positions, list(places), by_block, values, grads, sends)
