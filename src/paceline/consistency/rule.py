"""The rule for one shard: a machine that takes pushes and says what to merge, apply and answer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.consistency.policy import Policy
from paceline.consistency.stats import Stats
from paceline.consistency.weighting import find_weighting


@dataclass(frozen=True)
class Pushed:
    """One worker's part in a sum that arrives as one push."""

    worker: int
    round: int
    samples: float = 1.0
    before_barrier: bool = False
    """The worker pushed this before it came to the barrier at which it may be waiting."""


@dataclass(frozen=True)
class Merge:
    """Take the pushed values into a cohort."""

    cohort: int
    worker: int
    """Whose they are; of several whose sum it is, the first."""


@dataclass(frozen=True)
class Drop:
    """The push has missed more updates than the age limit allows: its values count for nothing."""

    worker: int
    version: int
    """Version that it was too old for."""


@dataclass(frozen=True)
class Apply:
    """A cohort is complete: run the optimizer once on its merged values, scaled by ``weight``."""

    cohort: int
    workers: tuple[int, ...]
    """Contributors, in the order in which their values are summed; with an age limit one may contribute twice."""
    samples: float
    staleness: int
    weight: float
    version: int
    """Version after the update."""


@dataclass(frozen=True)
class Release:
    """Answer these workers' pushes; all of them get the values of the same version."""

    workers: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class Repeat:
    """The push was seen before and is answered already: answer again, change nothing."""

    worker: int
    version: int


@dataclass(frozen=True)
class Refuse:
    """The push makes no sense; nothing has changed."""

    worker: int
    reason: str


Action: TypeAlias = Merge | Drop | Apply | Release | Repeat | Refuse


@dataclass
class _Cohort:
    number: int
    unit: int
    """The group that fills it; -1 where anybody may."""
    oldest: int
    """Oldest version that its contributors had read when they pushed."""
    workers: list[int] = field(default_factory=list)
    """Contributors as they came."""
    samples: dict[int, float] = field(default_factory=dict)
    """Per contributor."""

    def join(self, worker: int, samples: float, read: int) -> None:
        self.workers.append(worker)
        self.samples[worker] = self.samples.get(worker, 0.0) + samples
        self.oldest = min(self.oldest, read)


class Rule:
    """Merge, apply, read and bound for one shard (DESIGN: one rule for every consistency model).

    Rounds of a worker count from 1. A worker has at most one unanswered push.

    With an age limit a push that has missed more than ``age`` updates is dropped before it joins a cohort. Its round
    is finished and it is answered as any other, but it raises no version. Merge ``each`` with age R - 1 is then
    Ringmaster ASGD with delay threshold R (Maranjyan, Tyurin and Richtarik, ICML 2025), and ``first`` with age 0
    Rennala SGD with batch size K (Tyurin and Richtarik, NeurIPS 2023): K counts gradients of the current version, of
    which one worker may bring several.

    Args:
        policy: merge, bound, weighting and age limit.
        num_workers: ranks are 0 to ``num_workers - 1``.
        stats: counters of this shard.
    """

    def __init__(self, policy: Policy, num_workers: int, stats: Stats | None = None) -> None:
        policy.check(num_workers)
        self.policy = policy
        self.stats = Stats() if stats is None else stats
        self.version = 0
        self.live = set(range(num_workers))
        self.paused: set[int] = set()
        """Live workers that wait at a barrier; nobody waits for them."""
        self.unit = policy.unit_of(num_workers)
        self.pushed = [0] * num_workers
        """Last round that arrived, per worker."""
        self.finished = [0] * num_workers
        """Rounds that count for the bound, per worker."""
        self.answered = [0] * num_workers
        """Last round that was answered, per worker."""
        self.read = [0] * num_workers
        """Version that the worker got last."""
        self._level = [0] * num_workers
        self._weight = find_weighting(policy.weighting)
        self._open: list[_Cohort] = []
        self._next_cohort = 0

    def push(self, worker: int, round: int, samples: float = 1.0) -> list[Action]:
        """Take a push; returns what to do, in order."""
        return self.push_sum([Pushed(worker, round, samples)])

    def push_sum(self, pushes: Sequence[Pushed]) -> list[Action]:
        """Take what workers of one unit pushed, summed before it came here, as one; returns what to do, in order."""
        reason = self.objection_to_sum(pushes)
        first = pushes[0]
        if reason:
            return [Refuse(first.worker, reason)]
        if first.round <= self.pushed[first.worker]:
            answered = all(one.round <= self.answered[one.worker] for one in pushes)
            return [Repeat(first.worker, self.read[first.worker])] if answered else []
        for one in pushes:
            self.pushed[one.worker] = one.round
            if not one.before_barrier:
                self.paused.discard(one.worker)
        return [self._drop(first) if self._is_too_old(first.worker) else self._merge(pushes), *self._settle()]

    def _is_too_old(self, worker: int) -> bool:
        """Tell whether what a worker pushes now has missed too many updates; with an age limit, sums are of one."""
        return self.policy.age is not None and self.version - self.read[worker] > self.policy.age

    def _drop(self, push: Pushed) -> Drop:
        self.finished[push.worker] = push.round
        self.stats.dropped[push.worker] += 1
        return Drop(push.worker, self.version)

    def _merge(self, pushes: Sequence[Pushed]) -> Merge:
        first = pushes[0]
        cohort = self._cohort_for([one.worker for one in pushes])
        for one in pushes:
            cohort.join(one.worker, one.samples, self.read[one.worker])
        if self.policy.merge == "first":
            self.finished[first.worker] = first.round
        return Merge(cohort.number, first.worker)

    def objection_to_sum(self, pushes: Sequence[Pushed]) -> str:
        """Return why a sum of pushes would be refused, or an empty string."""
        reasons = [self.objection(one.worker, one.round, one.samples) for one in pushes]
        if any(reasons):
            return next(filter(None, reasons))
        workers = [one.worker for one in pushes]
        if len(set(workers)) < len(workers):
            return f"a sum over workers {workers} counts one of them twice"
        if len({self.unit[worker] for worker in workers}) > 1:
            return f"workers {workers} do not step together; their pushes cannot be summed"
        if len({one.round <= self.pushed[one.worker] for one in pushes}) > 1:
            return f"some but not all of the pushes of workers {workers} were seen before"
        return ""

    def objection(self, worker: int, round: int, samples: float) -> str:
        """Return why a push would be refused, or an empty string."""
        if not 0 <= worker < len(self.pushed):
            return f"worker {worker} is not part of this job"
        if worker not in self.live:
            return f"worker {worker} has left"
        if round < 1 or round > self.pushed[worker] + 1:
            return f"round {round} of worker {worker} came after round {self.pushed[worker]}"
        if round > self.pushed[worker] > self.answered[worker]:
            return f"round {round} of worker {worker} came before round {round - 1} was answered"
        if not 0 <= samples < float("inf"):
            return f"{samples} samples make no sense"
        return ""

    def leave(self, worker: int) -> list[Action]:
        """Take a worker out: nobody waits for it any more. What it has pushed still counts."""
        self.live.discard(worker)
        self.paused.discard(worker)
        return self._resume_all() + self._settle()

    def pause(self, worker: int) -> list[Action]:
        """Note that a worker enters a barrier: until all have, nobody waits for its pushes.

        Workers need not push equally often between barriers; without this, those that push more would wait at the
        rule for those that wait at the barrier.
        """
        if worker in self.live:
            self.paused.add(worker)
        return self._resume_all() + self._settle()

    def _resume_all(self) -> list[Action]:
        """When all live workers have come to the barrier it opens, and everybody is waited for again."""
        if not self.live <= self.paused:
            return []
        actions = self._settle()
        self.paused.clear()
        # Whoever pushed less before the barrier has nothing to catch up with.
        self._level = list(self.finished)
        return actions

    def readable(self, worker: int) -> int:
        """Return the version that a worker gets when it reads now.

        Members of a group get the version of their group's last answer, whatever other groups did since.
        """
        return self.read[worker] if self.policy.merge == "groups" else self.version

    def pull(self, worker: int) -> int:
        """Note that a worker reads all of the shard now; returns the version that it gets."""
        self.read[worker] = self.readable(worker)
        return self.read[worker]

    def waiting(self) -> list[int]:
        """Return the workers whose push is not answered yet."""
        return [worker for worker in sorted(self.live) if self.pushed[worker] > self.answered[worker]]

    def missing_for(self, worker: int) -> list[int]:
        """Return whose push the answer to a worker's push waits for."""
        waiting = self.waiting()
        if worker not in waiting:
            return []
        held_by = self._held_by(worker)
        if held_by is not None:
            return sorted(self._required(held_by) - set(held_by.samples) - set(waiting))
        slowest = self._slowest(worker)
        return [other for other in sorted(self._active) if self._ahead(other) == slowest and other not in waiting]

    def copy(self) -> Rule:
        """Return a rule that goes on where this one stands, with counters of its own in the same store."""
        stats, self.stats = self.stats, Stats()
        other = copy.deepcopy(self)
        self.stats, other.stats = stats, stats.copy()
        return other

    def is_like(self, other: Rule) -> bool:
        """Tell whether another rule of the same policy will do as this one does: both have no open cohort and agree.

        With ``all`` it does not matter what workers have read: nobody is ahead. It may differ, as answers are read when
        they are sent.
        """
        return not (self._open or other._open) and self._state == other._state

    def join(self, other: Rule) -> None:
        """Go on for the shard of another rule too, which is like this one; the older of what was read counts."""
        self.read = [min(both) for both in zip(self.read, other.read, strict=True)]

    @property
    def _state(self) -> tuple[object, ...]:
        """What decides what comes next, besides open cohorts."""
        read = [] if self.policy.merge == "all" else self.read
        return self.version, self.live, self.paused, self.pushed, self.finished, self.answered, self._level, read

    def check(self) -> None:
        """Assert what must always hold."""
        for worker, last in enumerate(self.pushed):
            assert self.answered[worker] <= last <= self.answered[worker] + 1, f"worker {worker}: unanswered pushes"
            assert self.finished[worker] <= last
            assert 0 <= self.read[worker] <= self.version
            assert 0 <= self._level[worker] <= self.finished[worker]
        assert self.paused <= self.live, "who has left waits at a barrier"
        assert not any(self._may_go_on(worker) for worker in self.waiting()), "who may go on was not answered"
        for cohort in self._open:
            self._check_open(cohort)
        if self.policy.merge == "first":
            assert len(self._open) <= (2 if self.policy.age is None else 1), "too many open cohorts"

    def _check_open(self, cohort: _Cohort) -> None:
        assert cohort.workers, "an open cohort is empty"
        assert not self._is_complete(cohort), "a complete cohort was not applied"
        assert set(cohort.workers) == set(cohort.samples)
        if self.policy.age is None:
            assert len(cohort.workers) == len(cohort.samples), "a cohort counts a worker twice"
        else:
            # Nothing but the one open cohort moves the version, so a push that was fresh when it joined stays fresh.
            assert self.version - cohort.oldest <= self.policy.age, "an open cohort holds what is too old"

    def _cohort_for(self, workers: Sequence[int]) -> _Cohort:
        unit = self.unit[workers[0]] if self.policy.merge in ("all", "groups") else -1
        for cohort in self._open:
            if cohort.unit == unit and (self.policy.age is not None or cohort.samples.keys().isdisjoint(workers)):
                return cohort
        cohort = _Cohort(self._next_cohort, unit, oldest=self.version)
        self._next_cohort += 1
        self._open.append(cohort)
        return cohort

    def _required(self, cohort: _Cohort) -> set[int]:
        if self.policy.merge in ("all", "groups"):
            return {worker for worker in self._active if self.unit[worker] == cohort.unit}
        return self._active

    def _is_complete(self, cohort: _Cohort) -> bool:
        if self.policy.merge == "each":
            return True
        if self.policy.merge == "first":
            return len(cohort.workers) >= self._pushes_needed()
        return self._required(cohort) <= set(cohort.samples)

    def _pushes_needed(self) -> int:
        """Return how many pushes complete a cohort of merge ``first``: none when everybody is at a barrier."""
        if self.policy.age is not None and self._active:
            return self.policy.first
        return min(self.policy.first, len(self._active))

    def _settle(self) -> list[Action]:
        actions: list[Action] = []
        for cohort in [cohort for cohort in self._open if self._is_complete(cohort)]:
            self._open.remove(cohort)
            actions.append(self._apply(cohort))
        return actions + self._releases()

    def _apply(self, cohort: _Cohort) -> Apply:
        staleness = self.version - cohort.oldest + 1
        weight = self._weight(staleness, self.stats.seen(staleness))
        self.stats.weight_sum += weight
        self.version += 1
        for worker, samples in cohort.samples.items():
            self.stats.data_mass[worker] += samples * weight
            if self.policy.merge != "first":
                self.finished[worker] = self.pushed[worker]
        ordered = self.policy.merge in ("all", "groups")
        workers = tuple(sorted(cohort.workers) if ordered else cohort.workers)
        return Apply(cohort.number, workers, sum(cohort.samples.values()), staleness, weight, self.version)

    def _releases(self) -> list[Action]:
        ready: dict[int, list[int]] = {}
        for worker in self.waiting():
            if self._may_go_on(worker):
                ready.setdefault(self.unit[worker], []).append(worker)
        for workers in ready.values():
            for worker in workers:
                self.answered[worker] = self.pushed[worker]
                self.read[worker] = self.version
        return [Release(tuple(workers), self.version) for workers in ready.values()]

    def _held_by(self, worker: int) -> _Cohort | None:
        """Return the cohort that must be complete before the worker goes on, whatever the bound."""
        if self.policy.merge == "first":
            # One push ahead of the oldest open cohort is enough: more would need a merge buffer each.
            return self._open[0] if any(worker in cohort.samples for cohort in self._open[1:]) else None
        return next((cohort for cohort in self._open if worker in cohort.samples), None)

    def _may_go_on(self, worker: int) -> bool:
        if self._held_by(worker) is not None:
            return False
        if self.policy.bound is None:
            return True
        return self._ahead(worker) - self._slowest(worker) <= self.policy.bound

    @property
    def _active(self) -> set[int]:
        """The workers that others wait for."""
        return self.live - self.paused

    def _ahead(self, worker: int) -> int:
        """Return the rounds that a worker has finished since the last barrier."""
        return self.finished[worker] - self._level[worker]

    def _slowest(self, worker: int) -> int:
        """Return the rounds that the slowest active worker has finished since the last barrier, this one included."""
        return min(self._ahead(other) for other in self._active | {worker})
