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
from paceline.hetero.forecast import Forecast, first_k, in_groups, lock_step, smallest_first
from paceline.hetero.groups import Groups, group_by_speed
from paceline.hetero.measured import Measured
from paceline.hetero.step_noise import StepNoise

#: How much better than lock step with equal batches another way must be; and than a way that comes before it.
LEAD, STEP = 1.1, 1.05

_SHARES = {"equal": "equal batches", "measured": "batches by speed", "pool": "a pool of samples"}


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
    """Choose how a job synchronises; without groups, those of :func:`~paceline.hetero.groups.group_by_speed` count.

    Raises:
        MissingExtraError: scikit-learn is not installed, and no groups are given.
    """
    found = group_by_speed(measured.seconds) if groups is None else groups
    ways = candidates(measured, found)
    best = preferred(ways)
    return Choice(best.store_type, best.policy, best.shares, sentence(measured, found, best, ways))


def preferred(ways: Sequence[Forecast]) -> Forecast:
    """Return the way to take: the first and most preferred one, or one that leads it and all others before."""
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


def sentence(measured: Measured, groups: Groups, best: Forecast, others: Sequence[Forecast]) -> str:
    """Describe the choice and its reason, with forecasts of the choice and of other ways; it may be among them."""
    against = [f"{rate(one)} with {_called(one)}" for one in others if _called(one) != _called(best)]
    text = f"{_called(best)}: {_machines(measured, groups)}; forecast: {rate(best)}"
    return text + (f", against {_listed(against)}" if against else "")


def named(store_type: str, policy: Policy, shares: str) -> str:
    """Return the name of a way to synchronise."""
    if policy.merge == "first":
        return f"{store_type} with K = {policy.first} and {_SHARES[shares]}"
    if policy.merge == "groups":
        return f"{store_type} with {len(policy.groups)} groups and {_SHARES[shares]}"
    return f"{store_type} with {_SHARES[shares]}"


def _called(one: Forecast) -> str:
    return named(one.store_type, one.policy, one.shares)


def rate(one: Forecast) -> str:
    """Return how many samples per second a way is forecast to train on, and what stale ones count."""
    stale = f" (stale ones count {one.worth:.2g})" if one.worth < 1 else ""
    return f"{one.samples_per_s:.4g} samples/s{stale}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _machines(measured: Measured, groups: Groups) -> str:
    times, slow = measured.seconds, groups[-1]
    if len(groups) == 1:
        text = f"all {len(times)} workers are alike ({min(times):.3g} to {max(times):.3g} s per step"
    else:
        who = f"worker {slow[0]} takes" if len(slow) == 1 else f"{len(slow)} of {len(times)} workers take"
        ratio = max(times) / min(times)
        text = f"{who} up to {ratio:.2g} times as long as the fastest ({min(times):.3g} s per step"
    return f"{text}, {noise_words(measured.noise)}, {measured.exchange_s:.3g} s per exchange)"


def noise_words(noise: StepNoise) -> str:
    """Return how much the times of steps vary."""
    text = f"jitter {noise.jitter:.0%}"
    if noise.spike_share:
        text += f", {noise.spike_share:.1%} of steps take {noise.spike_factor:.2g} times as long"
    return text
