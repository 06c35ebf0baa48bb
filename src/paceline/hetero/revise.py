"""Repeats the choice of ``dist_auto`` while the job trains, and changes it where workers can follow.

Where servers step, and count no pushes, a way to synchronise is a set of *groups*: ``dist_async`` is a group per
worker, lock step is one group of all. So a job of ``dist_async`` or ``dist_gsync`` is *free* to go from each of them
to the others. ``dist_sync`` steps on the workers, and ``dist_ksync`` counts pushes: such a job is *fixed*, and gets
advice.

==============================================================  ==================================================
a check finds                                                   effect
==============================================================  ==================================================
no other way that is better than that of now by :data:`HOLD`    none; doubts and advice end
such a way, and a free job can take it                          doubt; ``PATIENCE`` times in a row: new groups
such a way, and the job cannot take it                          doubt; ``PATIENCE`` times in a row: advice
==============================================================  ==================================================

Speeds and noise are those of now. The exchange and the update are those that were measured before the job began, and so
is the part of a step's time that is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.consistency import Policy
from paceline.hetero.choose import Choice, candidates, named, noise_words, preferred, rate
from paceline.hetero.forecast import Forecast, first_k, in_groups, lock_step
from paceline.hetero.groups import Doubt, Groups, group_by_speed, of_some
from paceline.hetero.measured import ROUNDS, Measured
from paceline.hetero.step_noise import Counted, noise_now

#: How much better another way must be than the way of now. Noise of speeds stays below it.
HOLD = 1.15


def free_policy(policy: Policy, num_workers: int) -> Policy:
    """Return a policy in the form in which its workers may change groups: ``dist_async`` as a group per worker."""
    if policy.merge != "each" or policy.bound is not None or policy.age is not None:
        return policy
    return replace(policy, merge="groups", groups=tuple((rank,) for rank in range(num_workers)))


@dataclass(frozen=True)
class StepTime:
    """How long a worker computes in a step now."""

    samples: float
    seconds: float
    counted: Counted = field(default_factory=Counted)
    """How much that varies."""


@dataclass(frozen=True)
class _Way:
    """A way to synchronise the present workers, and its worth now."""

    forecast: Forecast
    groups: Groups
    """Groups of ranks, where workers can change to it."""

    @property
    def kind(self) -> object:
        """The difference between ways."""
        if self.groups:
            return frozenset(map(frozenset, self.groups))
        return self.forecast.store_type, self.forecast.shares, self.forecast.policy.first

    @property
    def words(self) -> str:
        """Its name."""
        one = self.forecast
        if not self.groups or one.store_type == "dist_async":
            return named(one.store_type, one.policy, one.shares)
        if len(self.groups) == 1:
            return "lock step on the servers"
        return f"dist_gsync with groups {', '.join(' '.join(map(str, group)) for group in self.groups)}"


class Revision:
    """The choice of ``dist_auto`` in a running job, and the time to change it.

    Args:
        choice: with which the job began.
        measured: before it began, by rank.
        is_free: whether the job's workers can change groups.

    Attributes:
        groups: the groups of a free job now; empty for a fixed one.
        changes: how often the job has got new groups.
        advice: a better way that needs a new start, and the reason; empty: none.
    """

    def __init__(self, choice: Choice, measured: Measured, is_free: bool) -> None:
        self._choice, self._measured = choice, measured
        self.groups: Groups = free_policy(choice.policy, len(measured.workers)).groups if is_free else ()
        self.advice = ""
        self.changes = 0
        self._doubt, self._doubt_of_start = Doubt(), Doubt()
        self._advised: set[object] = set()

    def check(self, steps: Mapping[int, StepTime]) -> str:
        """Compare the way of now with the others; returns a change or new advice as text, else an empty string."""
        ranks = sorted(steps)
        self.groups = of_some(self.groups, ranks)
        measured = self._now(steps)
        found = group_by_speed(measured.seconds)
        changed = self._change(measured, ranks, found) if self.groups else ""
        return changed or self._advise(measured, ranks, found)

    def _change(self, measured: Measured, ranks: list[int], found: Groups) -> str:
        now, best = _free_way(measured, ranks, self.groups), _best_free_way(measured, ranks, found)
        if not self._doubt.is_sure(best.kind if _leads(best, now) else None):
            return ""
        self.groups = best.groups
        self.changes += 1
        return f"{best.words} from now on: {_why(measured, now, best)}"

    def _advise(self, measured: Measured, ranks: list[int], found: Groups) -> str:
        """Advise a way that needs a new start, if that is better than every way that the job can take now."""
        best = _Way(preferred(candidates(measured, found)), ())
        now = self._way_of_now(measured, ranks)
        beaten = [now, _best_free_way(measured, ranks, found)] if self.groups else [now]
        is_better = all(_leads(best, one) for one in beaten)
        is_sure = self._doubt_of_start.is_sure(best.kind if is_better else None)
        if is_sure:
            lead, why = best.forecast.score / now.forecast.score - 1, _why(measured, now, best)
            self.advice = f"{best.words} would be {lead:.0%} better: {why}. It takes a new start, from a checkpoint"
        elif not is_better:
            self.advice = ""
        if not is_sure or best.kind in self._advised:
            return ""
        self._advised.add(best.kind)
        return self.advice

    def _now(self, steps: Mapping[int, StepTime]) -> Measured:
        workers = self._measured.workers
        speeds = [
            workers[rank].times(one.seconds / workers[rank].seconds(one.samples)) for rank, one in sorted(steps.items())
        ]
        # The exchange is that of all workers that were measured.
        push_s, update_s = self._measured.push_s, self._measured.update_s
        exchange_s = push_s * len(speeds) + update_s
        noise = noise_now(self._measured.noise, ROUNDS * len(workers), [one.counted for one in steps.values()])
        return replace(self._measured, workers=tuple(speeds), noise=noise, exchange_s=exchange_s)

    def _way_of_now(self, measured: Measured, ranks: list[int]) -> _Way:
        if self.groups:
            return _free_way(measured, ranks, self.groups)
        choice = self._choice
        if choice.policy.merge == "all":
            return _Way(lock_step(measured, by_speed=choice.shares == "measured"), ())
        if choice.policy.merge == "groups":
            groups = of_some(choice.policy.groups, ranks)
            return _Way(_free_way(measured, ranks, groups).forecast, ())
        return _Way(first_k(measured, min(max(choice.policy.first, 1), len(ranks))), ())


def _leads(best: _Way, now: _Way) -> bool:
    """Tell whether a way is another one, and better than noise can make it."""
    return best.kind != now.kind and best.forecast.score > HOLD * now.forecast.score


def _why(measured: Measured, now: _Way, best: _Way) -> str:
    times = measured.seconds
    rates = f"forecast: {rate(best.forecast)}, against {rate(now.forecast)} with {now.words}"
    return f"steps take {min(times):.3g} to {max(times):.3g} s now, {noise_words(measured.noise)}; {rates}"


def _best_free_way(measured: Measured, ranks: list[int], found: Groups) -> _Way:
    """Return the best of the ways that a free job can take; ``found`` are groups by speed, of indices into ranks."""
    by_speed = tuple(tuple(ranks[index] for index in group) for group in found)
    ways = [
        _Way(lock_step(measured, by_speed=False), (tuple(ranks),)),
        _Way(first_k(measured, 1), tuple((rank,) for rank in ranks)),
    ]
    if 1 < len(found) < len(ranks):
        ways.append(_Way(in_groups(measured, found), by_speed))
    best = preferred([way.forecast for way in ways])
    return next(way for way in ways if way.forecast is best)


def _free_way(measured: Measured, ranks: list[int], groups: Groups) -> _Way:
    if len(groups) == 1:
        return _Way(lock_step(measured, by_speed=False), groups)
    if len(groups) == len(ranks):
        return _Way(first_k(measured, 1), groups)
    index = {rank: number for number, rank in enumerate(ranks)}
    return _Way(in_groups(measured, tuple(tuple(index[rank] for rank in group) for group in groups)), groups)
