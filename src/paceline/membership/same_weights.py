"""Compares the weights of workers that step alike. Pure.

Each worker sums its weights after the same steps: per parameter, with the same random signs
(:mod:`paceline.worker.weight_sums`). Sums of equal weights are equal, and those of others are almost never. Unlike
machines round differently, so a worker says by how much each sum may differ.

| sums of a step                        | action                                                      |
|---------------------------------------|-------------------------------------------------------------|
| differ                                | a line that names the workers, a parameter, and the way out |
| differ between the same workers again | none                                                        |
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.naming import listed, workers_text
from paceline.wire import messages as m

WAY_OUT = (
    "Load weights before that (all workers then get worker 0's), or on every worker, or call "
    "optimizer.broadcast_weights() on every worker after it; and step alike on every worker"
)


class SameWeights:
    """The sums of one job's workers."""

    def __init__(self, way_out: str = WAY_OUT) -> None:
        self._way_out = way_out
        self._said: list[tuple[str, list[list[int]]]] = []
        """Stores, and which of their workers had the same weights when that was said."""

    def compare(self, store: str, step: int, found: Mapping[int, m.WorkerStep]) -> list[str]:
        """Return a line where the weights of workers differ after a step."""
        alike = _alike(found)
        if len(alike) == 1 or (store, alike) in self._said:
            return []
        self._said.append((store, alike))
        return [f"{_line(step, alike, found)}. {self._way_out}"]


def _alike(found: Mapping[int, m.WorkerStep]) -> list[list[int]]:
    """Return the ranks with the same weights, the most of them first; of as many, those with the lowest rank."""
    groups: list[list[int]] = []
    for rank in sorted(found):
        home = next((one for one in groups if not _differing(found[one[0]], found[rank])), None)
        if home is None:
            groups.append([rank])
        else:
            home.append(rank)
    return sorted(groups, key=lambda one: (-len(one), one[0]))


def _differing(one: m.WorkerStep, other: m.WorkerStep) -> list[str]:
    """Return the names of the parameters whose sums differ by more than rounding explains."""
    theirs = {name: found for name, *found in other.sums}
    return [name for name, *found in one.sums if name in theirs and _differ(*found, *theirs[name])]


def _differ(total: float, slack: float, other: float, other_slack: float) -> bool:
    if math.isfinite(total) and math.isfinite(other):
        return abs(total - other) > max(slack, other_slack)
    return math.isfinite(total) != math.isfinite(other)


def _line(step: int, alike: list[list[int]], found: Mapping[int, m.WorkerStep]) -> str:
    most, *others = alike
    apart = sorted(rank for group in others for rank in group)
    names = listed(map(repr, _differing(found[most[0]], found[others[0][0]])), 1)
    return (
        f"{workers_text(apart)} {'has' if len(apart) == 1 else 'have'} other weights than {workers_text(most)} "
        f"after step {step}: parameter {names}. Nothing brings them together: what one worker alone loads "
        "or changes after the optimizer or Trainer was made stays its own, be it weights, gradients after backward, "
        "learning rates, or the batch size of Trainer.update"
    )
