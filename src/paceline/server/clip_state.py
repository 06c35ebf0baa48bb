"""What slots of a store that clips know: complete cohorts that are held, their norms, and who asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from paceline.consistency import Apply, Release
from paceline.peer.errors_by_name import failed
from paceline.server.merge import Accumulator
from paceline.wire import messages as m

ReplyFn: TypeAlias = Callable[[m.Reply], None]

#: Squares of so many elements stay in a cache.
_CHUNK = 65_536


@dataclass(eq=False)
class Norm:
    """The norm of the merged gradient of a slot in one cohort."""

    rounds: dict[int, int]
    """The round of every worker in the cohort."""
    squares: float
    """Sum of squares, after the mean."""
    skipped: bool
    error: Exception | None = None
    """Why there is no merged gradient."""


@dataclass(eq=False)
class Held:
    """A complete cohort of a slot that waits for its factor, with those whom it keeps waiting."""

    action: Apply
    accumulator: Accumulator
    norm: Norm
    releases: list[Release] = field(default_factory=list)


@dataclass(eq=False)
class Question:
    """A worker's question for the norm over some slots; answered when all of them are merged."""

    worker: int
    reply: ReplyFn
    waiting: int = 1
    """Slots that are not merged yet, and one while the question is still being taken in."""
    norms: list[Norm] = field(default_factory=list)

    def take(self, norm: Norm | None) -> None:
        """Use what is known of one slot, or the end of the question, and answer if that was the last."""
        if norm is not None:
            self.norms.append(norm)
        self.waiting -= 1
        if self.waiting == 0:
            error = next((one.error for one in self.norms if one.error is not None), None)
            squares = sum(sorted(one.squares for one in self.norms))  # in an order that is the same for all workers
            skipped = any(one.skipped for one in self.norms)
            self.reply(m.NormIs(squares, skipped) if error is None else failed(error))


@dataclass(eq=False)
class Clipping:
    """What a slot of a store that clips knows, by unit of workers."""

    held: dict[int, Held] = field(default_factory=dict)
    norms: dict[int, Norm] = field(default_factory=dict)
    """Of the last cohort, held or applied: who asks late gets the same answer."""
    questions: dict[int, list[tuple[Question, int]]] = field(default_factory=dict)
    """Who asks for a cohort that is not complete, with the asker's round."""

    def halves(self, at: int) -> tuple[Clipping, Clipping]:
        """Return what both parts of a slot that is cut in two know."""
        left, right = Clipping(), Clipping()
        for unit, norm in self.norms.items():
            # Who asks for one part asks for both; of a cohort that is gone nobody knows the parts.
            left.norms[unit], right.norms[unit] = norm, Norm(norm.rounds, 0.0, norm.skipped, norm.error)
        for unit, held in self.held.items():
            pairs = zip((left, right), held.accumulator.split(at), strict=True)
            for half, accumulator in pairs:
                norm = Norm(held.norm.rounds, square_sum(accumulator), held.norm.skipped)
                half.norms[unit] = norm
                half.held[unit] = Held(held.action, accumulator, norm, list(held.releases))
        for unit, asked in self.questions.items():
            left.questions[unit], right.questions[unit] = list(asked), list(asked)
            for question, _ in asked:
                question.waiting += 1
        return left, right


def square_sum(accumulator: Accumulator) -> float:
    """Return the sum of squares of a merged gradient. Its order does not depend on where in memory the values lie."""
    found = accumulator.mean()
    if found is None or accumulator.skip:
        return 0.0
    values, scale = found
    flat = values.values().reshape(-1) if values.is_sparse else values
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    parts = (flat[start : start + _CHUNK].to(wide) for start in range(0, flat.numel(), _CHUNK))
    total = sum(float((part * part).sum()) for part in parts)
    return total * scale * scale
