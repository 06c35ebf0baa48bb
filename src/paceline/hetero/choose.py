"""Chooses how a job synchronises, from measurements, and says why in one sentence.

Lock step with equal batches is preferred: no gradient is stale, and the learning rate keeps its meaning. It is left for
a way that is forecast to be better by :data:`LEAD`. Then come batches by speed, no lock step, and groups, which suit
only machines whose speeds stay as they are: each must lead the one before by :data:`STEP`. Stale updates are never
weighted by 1/Y here: with data of their own, fast workers would determine nearly all of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.consistency import Policy
from paceline.hetero.explain_choice import named, sentence
from paceline.hetero.forecast import Forecast, first_k, in_groups, lock_step, smallest_first
from paceline.hetero.groups import Groups, group_by_speed
from paceline.hetero.measured import Measured

#: How much better than lock step with equal batches another way must be; and than a way that comes before it.
LEAD, STEP = 1.1, 1.05


@dataclass(frozen=True)
class Choice:
    """How a job synchronises."""

    store_type: str
    policy: Policy
    shares: str
    """``equal``; ``measured``: batches by speed; ``pool``: one queue of samples."""
    sentence: str
    """The choice and its reason, with the numbers."""

    @property
    def words(self) -> str:
        """The choice without the reason: ``dist_ksync with K = 4 and a pool of samples``."""
        return named(self.store_type, self.policy, self.shares)


def choose(measured: Measured, groups: Groups | None = None) -> Choice:
    """Choose how a job synchronises.

    Args:
        measured: times of the machines.
        groups: workers of like speed; by default found by :func:`~paceline.hetero.groups.group_by_speed`.

    Raises:
        MissingExtraError: scikit-learn is not installed, and no groups are given.
    """
    found = group_by_speed(measured.seconds) if groups is None else groups
    ways = candidates(measured, found)
    best = preferred(ways)
    return Choice(best.store_type, best.policy, best.shares, sentence(measured, found, best, ways))


def preferred(ways: Sequence[Forecast]) -> Forecast:
    """Return the way to take: the first one, or one that leads it and all others that come before.

    Args:
        ways: the preferred ones first.
    """
    best = ways[0]
    for way in ways:
        if way.score > (LEAD if best is ways[0] else STEP) * best.score:
            best = way
    return best


def candidates(measured: Measured, groups: Groups) -> list[Forecast]:
    """Return the ways to synchronise, the preferred ones first."""
    ways = [lock_step(measured, by_speed=False)]
    if len(measured.workers) == 1:
        return ways
    if measured.hands_out and len(groups) > 1:  # of machines that are alike, speeds differ by chance
        ways.append(lock_step(measured, by_speed=True))
    ways.append(first_k(measured, smallest_first(measured)))
    if 1 < len(groups) < len(measured.workers):
        ways.append(in_groups(measured, groups))
    return ways
