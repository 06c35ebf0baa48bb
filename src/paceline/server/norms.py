"""The state of slots in a store that clips: complete cohorts that are held, their norms, and questions for them.

A norm is kept as one sum of squares for each range that was merged as one, whatever becomes of the slots. A question
for a range gets the sums of all these ranges that overlap it, each once. So slots can be cut and joined between two
questions for the same round, and both get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.consistency import Apply, Release
from paceline.server.members import Asker
from paceline.server.merge import Accumulator
from paceline.wire import messages as m

#: Squares of so many elements stay in a cache.
_CHUNK = 65_536


@dataclass(eq=False)
class Norm:
    """The norm of the merged gradient of a slot in one cohort."""

    rounds: dict[int, int]
    """The round of every worker in the cohort."""
    squares: dict[m.Span, float]
    """Sum of squares of every range that was merged as one, after the mean."""
    skipped: bool
    error: Exception | None = None
    """Why there is no merged gradient."""


@dataclass(eq=False)
class HeldCohort:
    """A complete cohort of a slot that waits for its factor, and the releases that wait with it."""

    action: Apply
    accumulator: Accumulator
    norm: Norm
    releases: list[Release] = field(default_factory=list)


@dataclass(eq=False)
class Question:
    """A worker's question for the norm over some ranges; answered when all of them are merged."""

    asker: Asker
    waiting: int = 1
    """Slots that are not merged yet, and one while the question is still being taken in."""
    squares: dict[m.Span, float] = field(default_factory=dict)
    skipped: bool = False
    error: Exception | None = None

    def take(self, norm: Norm, span: m.Span) -> None:
        """Use a slot's norm for a range that overlaps it, and answer if that was the last slot."""
        self.squares |= {one: square for one, square in norm.squares.items() if one.overlaps(span)}
        self.skipped, self.error = self.skipped or norm.skipped, self.error or norm.error
        self.end()

    def end(self) -> None:
        """Wait for one slot less, and answer if that was the last."""
        self.waiting -= 1
        if self.waiting:
            return
        if self.error is not None:
            self.asker.fail(self.error)
            return
        squares = sum(sorted(self.squares.values()))  # in an order that is the same for all workers
        self.asker.answer(m.NormIs(squares, self.skipped))


@dataclass(frozen=True)
class Asked:
    """A question for a round of a range that is not merged yet."""

    question: Question
    round: int
    span: m.Span


@dataclass(eq=False)
class Clipping:
    """The state of a slot in a store that clips, by unit of workers."""

    held: dict[int, HeldCohort] = field(default_factory=dict)
    norms: dict[int, Norm] = field(default_factory=dict)
    """Norm of the last cohort, held or applied: a late question gets the same answer."""
    questions: dict[int, list[Asked]] = field(default_factory=dict)
    """For a cohort that is not complete."""

    def split(self, position: int) -> tuple[Clipping, Clipping]:
        """Return the state of both parts of a slot that is cut at a position of the bucket."""
        left, right = Clipping(norms=dict(self.norms)), Clipping(norms=dict(self.norms))
        for unit, held in self.held.items():
            [span] = held.norm.squares
            parts = span.part(span.start, position), span.part(position, span.stop)
            accumulators = held.accumulator.split(position - span.start)
            for half, part, accumulator in zip((left, right), parts, accumulators, strict=True):
                norm = Norm(held.norm.rounds, {part: square_sum(accumulator)}, held.norm.skipped)
                half.norms[unit] = norm
                half.held[unit] = HeldCohort(held.action, accumulator, norm, list(held.releases))
        for unit, asked in self.questions.items():
            left.questions[unit] = [one for one in asked if one.span.start < position]
            right.questions[unit] = [one for one in asked if one.span.stop > position]
            for one in asked:
                one.question.waiting += one.span.start < position < one.span.stop
        return left, right

    @property
    def is_busy(self) -> bool:
        """Whether a cohort is held, or a question waits."""
        return bool(self.held) or any(self.questions.values())

    def stands_like(self, right: Clipping) -> bool:
        """Tell whether the last norms of a neighbour are those of the same rounds."""
        return self.norms.keys() == right.norms.keys() and all(
            (one.rounds, one.skipped, one.error) == (other.rounds, other.skipped, other.error)
            for one, other in ((one, right.norms[unit]) for unit, one in self.norms.items())
        )

    def beside(self, right: Clipping) -> Clipping:
        """Return the joint state of this slot and a neighbour that stands like it."""
        return Clipping(
            norms={
                unit: Norm(one.rounds, one.squares | right.norms[unit].squares, one.skipped, one.error)
                for unit, one in self.norms.items()
            }
        )


def square_sum(accumulator: Accumulator) -> float:
    """Return the sum of squares of a merged gradient. Its order does not depend on where in memory the values lie."""
    found = accumulator.result(to_read=True)
    if found is None or accumulator.skip:
        return 0.0
    values, scale = found
    flat = values.values().reshape(-1) if values.is_sparse else values
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    parts = (flat[start : start + _CHUNK].to(wide) for start in range(0, flat.numel(), _CHUNK))
    total = sum(float((part * part).sum()) for part in parts)
    return total * scale * scale
