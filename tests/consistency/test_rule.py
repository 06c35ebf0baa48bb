"""The rule under random interleavings, against a model that shares no code with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.consistency import (
    Action,
    Apply,
    Drop,
    Grace,
    Merge,
    Policy,
    Pushed,
    Refuse,
    Release,
    Repeat,
    Stats,
    new_rule,
)
from paceline.testing import CheckedRule

QUICK = settings(max_examples=25, stateful_step_count=30, deadline=None)
WEIGHTINGS = st.sampled_from(["inverse", "none", "normalised"])
BOUNDS = st.none() | st.integers(0, 3)
AGES = st.none() | st.integers(0, 3)


@st.composite
def partitions(draw: st.DrawFn, num_workers: int) -> tuple[tuple[int, ...], ...]:
    group_of = [draw(st.integers(0, num_workers - 1)) for _ in range(num_workers)]
    members = [tuple(rank for rank in range(num_workers) if group_of[rank] == group) for group in range(num_workers)]
    return tuple(group for group in members if group)


@dataclass(frozen=True)
class Part:
    """What one worker has in a cohort."""

    worker: int
    round: int
    samples: float
    read: int


class Model(RuleBasedStateMachine):
    """Tracks what every worker did and got; subclasses say under which policies."""

    with_barriers = False

    def policy(self, data: st.DataObject, num_workers: int) -> Policy:
        raise NotImplementedError

    @initialize(num_workers=st.integers(1, 5), data=st.data())
    def start(self, num_workers: int, data: st.DataObject) -> None:
        self.settings = self.policy(data, num_workers)
        self.rule = CheckedRule(self.settings, num_workers)
        self.live = set(range(num_workers))
        self.paused: set[int] = set()
        self.unit = {rank: i for i, group in enumerate(self.settings.groups) for rank in group}
        self.pushed = [0] * num_workers
        self.answered = [0] * num_workers
        self.finished = [0] * num_workers
        self.level = [0] * num_workers
        self.read = [0] * num_workers
        self.version = 0
        self.open: dict[int, list[Part]] = {}
        self.graced: set[int] = set()
        self.over = -1
        self.applied: set[tuple[int, int]] = set()
        self.dropped: set[tuple[int, int]] = set()
        self.ages: list[int] = []
        self.weights: list[float] = []
        self.mass: defaultdict[int, float] = defaultdict(float)

    # ---- events ----------------------------------------------------------------------------------------------------

    def ready(self) -> list[int]:
        return sorted(w for w in self.active if self.pushed[w] == self.answered[w])

    def free(self) -> list[int]:
        return sorted(w for w in self.live if self.pushed[w] == self.answered[w])

    @property
    def active(self) -> set[int]:
        return self.live - self.paused

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), samples=st.sampled_from([0.0, 1.0, 16.0, 48.0]))
    def push_next_round(self, data: st.DataObject, samples: float) -> None:
        worker = data.draw(st.sampled_from(self.ready()))
        self.pushed[worker] += 1
        self.take(self.rule.push(worker, self.pushed[worker], samples), {worker: samples})

    @precondition(lambda self: self.settings.merge in ("all", "groups") and self.free())
    @rule(data=st.data())
    def push_sum_of_mates(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(self.free()))
        mates = [w for w in self.free() if w != first and self.unit.get(w) == self.unit.get(first)]
        chosen = [first, *(data.draw(st.lists(st.sampled_from(mates), unique=True)) if mates else [])]
        samples = {w: data.draw(st.sampled_from([0.0, 1.0, 16.0])) for w in chosen}
        for w in chosen:
            self.pushed[w] += 1
        self.take(self.rule.push_sum([Pushed(w, self.pushed[w], samples[w]) for w in chosen]), samples)

    @precondition(lambda self: any(self.pushed[w] for w in self.live))
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(w for w in self.live if self.pushed[w])))
        round = data.draw(st.integers(1, self.pushed[worker]))
        actions = self.rule.push(worker, round, 7.0)
        answered = round <= self.answered[worker]
        assert actions == ([Repeat(worker, self.read[worker])] if answered else [])

    @rule(data=st.data(), round=st.integers(-2, 9), samples=st.sampled_from([1.0, -1.0, float("nan"), float("inf")]))
    def push_nonsense(self, data: st.DataObject, round: int, samples: float) -> None:
        worker = data.draw(st.integers(-1, len(self.pushed)))
        if worker in self.live and 0 <= samples < float("inf"):
            next_round = self.pushed[worker] + 1
            if 1 <= round < next_round or (round == next_round and self.pushed[worker] == self.answered[worker]):
                return
        before = repr(self.rule.__dict__)
        (refusal,) = self.rule.push(worker, round, samples)
        assert isinstance(refusal, Refuse)
        assert refusal.worker == worker
        assert refusal.reason
        assert repr(self.rule.__dict__) == before

    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(range(len(self.pushed))))
        # Who is alone in a group need not agree with anybody.
        if self.settings.merge != "groups" or (worker,) in self.settings.groups:
            self.read[worker] = self.version
        assert self.rule.pull(worker) == self.read[worker]

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.live)))
        self.live.discard(worker)
        self.paused.discard(worker)
        self.take(self.rule.leave(worker))
        self.open_barrier()

    @precondition(lambda self: self.graced & self.open.keys())
    @rule(data=st.data())
    def end_grace(self, data: st.DataObject) -> None:
        cohort = data.draw(st.sampled_from([*sorted(self.graced & self.open.keys()), 99]))
        self.over = cohort
        actions = self.rule.end_grace(cohort)
        assert bool(actions) == (cohort != 99)
        self.take(actions)
        assert cohort not in self.open

    @precondition(lambda self: self.with_barriers)
    @rule(data=st.data())
    def enter_barrier(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(range(len(self.pushed))))
        self.paused |= {worker} & self.live
        self.take(self.rule.pause(worker))
        self.open_barrier()

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def leave_barrier(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.paused)))
        mates = [other for other in self.active if self.settings.merge != "groups" or self.are_mates(other, worker)]
        if mates and self.settings.merge in ("all", "groups"):
            self.level[worker] = self.finished[worker] - min(self.finished[w] - self.level[w] for w in mates)
        self.paused.discard(worker)
        self.take(self.rule.come_back(worker, 0))

    def are_mates(self, one: int, other: int) -> bool:
        return self.unit.get(one) == self.unit.get(other)

    def open_barrier(self) -> None:
        if self.live <= self.paused:
            assert not self.open, "what was pushed before a barrier is applied when it opens"
            assert not self.rule.waiting()
            self.paused.clear()
            self.level = list(self.finished)

    # ---- what must follow ------------------------------------------------------------------------------------------

    def take(self, actions: list[Action], samples: Mapping[int, float] | None = None) -> None:
        samples = samples or {}
        assert [type(one) for one in actions if isinstance(one, Merge | Drop)] == self.what_is_done_with(samples)
        for action in actions:
            match action:
                case Merge():
                    self.take_merge(action, samples)
                case Drop():
                    assert action == Drop(next(iter(samples)), self.version)
                    self.dropped.add((action.worker, self.pushed[action.worker]))
                    self.finished[action.worker] = self.pushed[action.worker]
                case Apply():
                    self.take_update(action)
                case Grace():
                    assert action.cohort not in self.graced, "it has one time of grace"
                    assert len(self.open[action.cohort]) >= min(self.settings.first, len(self.active))
                    self.graced.add(action.cohort)
                case Release():
                    self.take_release(action)
                case _:
                    raise AssertionError(f"unexpected {action}")
        self.check_bound([w for one in actions if isinstance(one, Release) for w in one.workers])

    def what_is_done_with(self, samples: Mapping[int, float]) -> list[type[Action]]:
        if not samples:
            return []
        age = self.settings.age
        return [Drop] if age is not None and any(self.version - self.read[w] > age for w in samples) else [Merge]

    def take_merge(self, merge: Merge, samples: Mapping[int, float]) -> None:
        assert merge.worker == next(iter(samples))
        cohort = self.open.setdefault(merge.cohort, [])
        if self.settings.age is None:
            assert {part.worker for part in cohort}.isdisjoint(samples), "a cohort counts distinct workers"
        cohort += [Part(w, self.pushed[w], count, self.read[w]) for w, count in samples.items()]
        if self.settings.merge == "first":
            self.finished[merge.worker] = self.pushed[merge.worker]

    def take_update(self, update: Apply) -> None:
        cohort = self.open.pop(update.cohort)
        workers = [part.worker for part in cohort]
        assert list(update.workers) == (sorted(workers) if self.settings.merge in ("all", "groups") else workers)
        self.check_complete(workers, update.cohort)
        assert update.staleness == self.version - min(part.read for part in cohort) + 1
        self.ages.append(update.staleness)
        assert update.weight == pytest.approx(self.weight(update.staleness))
        self.weights.append(update.weight)
        self.version += 1
        assert update.version == self.version
        assert update.samples == sum(part.samples for part in cohort)
        for part in cohort:
            assert (part.worker, part.round) not in self.applied, "a push was applied twice"
            self.applied.add((part.worker, part.round))
            self.mass[part.worker] += part.samples * update.weight
            if self.settings.merge != "first":
                self.finished[part.worker] = part.round

    def check_complete(self, cohort: list[int], number: int) -> None:
        match self.settings.merge:
            case "all":
                assert self.active <= set(cohort)
            case "groups":
                unit = {self.unit[w] for w in cohort}
                assert len(unit) == 1
                assert {w for w in self.active if self.unit[w] in unit} <= set(cohort)
            case "each":
                assert len(cohort) == 1
            case "first" if self.settings.age is not None:
                assert len(cohort) == self.settings.first or not self.active
                assert 1 <= len(cohort) <= self.settings.first
            case "first":
                if self.settings.grace_s:
                    assert number == self.over or self.active <= set(cohort)
                else:
                    assert min(self.settings.first, len(self.active)) <= len(cohort) <= self.settings.first

    def weight(self, age: int) -> float:
        match self.settings.weighting:
            case "none":
                return 1.0
            case "inverse":
                return 1 / age
            case "normalised":
                return len(self.ages) / (age * sum(1 / one for one in self.ages))
        raise AssertionError(f"what a weighting {self.settings.weighting!r} should make is not known here")

    def take_release(self, release: Release) -> None:
        assert release.version == self.version
        for w in release.workers:
            assert w in self.live
            assert self.pushed[w] == self.answered[w] + 1
            if self.settings.merge != "first":
                assert (w, self.pushed[w]) in self.applied | self.dropped, "a worker goes on before its push counts"
            self.answered[w] = self.pushed[w]
            self.read[w] = self.version

    def check_bound(self, released: list[int]) -> None:
        if self.settings.bound is None:
            return
        for w in released:
            slowest = min(self.finished[other] - self.level[other] for other in self.active | {w})
            assert self.answered[w] - self.level[w] - slowest <= self.settings.bound

    @invariant()
    def rule_is_where_the_model_is(self) -> None:
        assert self.rule.version == self.version
        assert self.rule.read == self.read
        assert self.rule.answered == self.answered

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        assert set(self.rule.waiting()) == {w for w in self.live if self.pushed[w] > self.answered[w]}
        assert not self.active or not self.active <= set(self.rule.waiting())

    @invariant()
    def who_waits_is_told_for_whom(self) -> None:
        waiting = set(self.rule.waiting())
        for worker in range(len(self.pushed)):
            missing = set(self.rule.missing_for(worker))
            assert bool(missing) == (worker in waiting)
            assert missing <= self.active - waiting, "a missing worker is one that is still computing"

    @invariant()
    def members_read_the_same_version(self) -> None:
        for group in self.settings.groups if not self.with_barriers else ():
            assert len({self.read[w] for w in group if w in self.live}) <= 1

    @invariant()
    def every_push_is_applied_or_dropped_or_open_exactly_once(self) -> None:
        pushed = {(w, round) for w, last in enumerate(self.pushed) for round in range(1, last + 1)}
        open_now = [(part.worker, part.round) for cohort in self.open.values() for part in cohort]
        assert sorted([*open_now, *self.applied, *self.dropped]) == sorted(pushed)

    @invariant()
    def what_was_fresh_when_it_joined_is_fresh_until_it_counts(self) -> None:
        if self.settings.age is not None:
            for part in [part for cohort in self.open.values() for part in cohort]:
                assert self.version - part.read <= self.settings.age
            assert max(self.ages, default=1) <= self.settings.age + 1

    @invariant()
    def counters_add_up(self) -> None:
        stats = self.rule.stats
        assert stats.updates == len(self.ages) == self.version
        assert stats.staleness == Counter(self.ages)
        assert stats.inverse_sum == pytest.approx(sum(1 / age for age in self.ages))
        assert stats.weight_sum == pytest.approx(sum(self.weights))
        assert all(stats.data_mass[w] == pytest.approx(mass) for w, mass in self.mass.items())
        assert stats.dropped == Counter(w for w, _ in self.dropped)

    @invariant()
    def two_cohorts_are_enough(self) -> None:
        if self.settings.merge == "first":
            assert len(self.open) <= (2 if self.settings.age is None else 1)

    def teardown(self) -> None:
        if not hasattr(self, "rule"):
            return
        other = self.rule.copy()
        assert other.stats == self.rule.stats
        assert self.rule.is_like(other) == other.is_like(self.rule) == (not self.open)
        for worker in self.ready():
            before = repr(self.rule.__dict__ | {"stats": None})
            other.push(worker, self.pushed[worker] + 1)
            assert repr(self.rule.__dict__ | {"stats": None}) == before
            assert not self.rule.is_like(other)
        everybody_left = [action for worker in sorted(self.live) for action in self.rule.leave(worker)]
        assert not any(isinstance(action, Merge) for action in everybody_left)
        self.live.clear()
        assert all(self.rule.missing_for(worker) == [] for worker in range(len(self.pushed)))


class All(Model):
    def policy(self, data: st.DataObject, num_workers: int) -> Policy:
        return Policy("all", weighting=data.draw(WEIGHTINGS))

    @invariant()
    def nothing_is_ever_stale(self) -> None:
        assert set(self.ages) <= {1}


class Each(Model):
    def policy(self, data: st.DataObject, num_workers: int) -> Policy:
        return Policy("each", bound=data.draw(BOUNDS), weighting=data.draw(WEIGHTINGS), age=data.draw(AGES))


class Groups(Model):
    def policy(self, data: st.DataObject, num_workers: int) -> Policy:
        groups = data.draw(partitions(num_workers))
        return Policy("groups", groups, bound=data.draw(BOUNDS), weighting=data.draw(WEIGHTINGS))


class FirstK(Model):
    def policy(self, data: st.DataObject, num_workers: int) -> Policy:
        age = data.draw(AGES)
        first = data.draw(st.integers(1, num_workers if age is None else 3 * num_workers))
        return Policy("first", first=first, bound=data.draw(BOUNDS), weighting=data.draw(WEIGHTINGS), age=age)


class FirstKWithGrace(Model):
    def policy(self, data: st.DataObject, num_workers: int) -> Policy:
        return Policy("first", first=data.draw(st.integers(1, num_workers)), bound=data.draw(BOUNDS), grace_s=2.0)


class Barriers(Model):
    """Workers that wait at a barrier hold up nobody, so rounds need not be even."""

    with_barriers = True

    def policy(self, data: st.DataObject, num_workers: int) -> Policy:
        return data.draw(st.sampled_from([All, Each, Groups, FirstK, FirstKWithGrace])).policy(self, data, num_workers)


TestAll = All.TestCase
TestEach = Each.TestCase
TestGroups = Groups.TestCase
TestFirstK = FirstK.TestCase
TestFirstKWithGrace = FirstKWithGrace.TestCase
TestBarriers = Barriers.TestCase
TestAll.settings = TestEach.settings = TestGroups.settings = TestFirstK.settings = QUICK
TestFirstKWithGrace.settings = settings(QUICK, max_examples=60)
TestBarriers.settings = TestFirstKWithGrace.settings


# ---- by example: the table of the consistency models ----------------------------------------------------------------


def releases(actions: list[Action]) -> list[Release]:
    return [action for action in actions if isinstance(action, Release)]


def updates(actions: list[Action]) -> list[Apply]:
    return [action for action in actions if isinstance(action, Apply)]


def test_sync_applies_once_and_releases_everybody_when_the_last_has_pushed() -> None:
    rule = CheckedRule(Policy("all"), 3)
    assert rule.push(2, 1, 16) == [Merge(0, 2)]
    assert rule.push(0, 1, 48) == [Merge(0, 0)]
    assert rule.missing_for(2) == [1]
    assert rule.push(1, 1, 0) == [Merge(0, 1), Apply(0, (0, 1, 2), 64.0, 1, 1.0, 1), Release((0, 1, 2), 1)]
    assert rule.missing_for(2) == []


@pytest.mark.parametrize("policy", [Policy("groups", ((0, 1), (2, 3)), bound=0), Policy("all", bound=0)])
def test_worker_that_goes_on_before_its_barrier_opens_waits_for_nobody_for_ever(policy: Policy) -> None:
    """Its mates have finished a round without it; each of the two would wait for the other."""
    rule = CheckedRule(policy, 4)
    rule.pause(0)
    rule.pause(2)
    rule.leave(1)
    rule.push(3, 1)
    assert rule.answered[3] == 1
    rule.come_back(2, 0)
    rule.push(2, 1)
    for round in (2, 3, 4):
        assert rule.missing_for(2) == [3]
        rule.push(3, round)
        rule.push(2, round)
        assert rule.answered[3] == round
        assert rule.answered[2] == round - 1
    rule.check()


def test_async_push_that_missed_three_updates_has_staleness_four() -> None:
    rule = CheckedRule(Policy("each", weighting="inverse"), 2)
    for round in (1, 2, 3):
        assert releases(rule.push(0, round)) == [Release((0,), round)]
    assert updates(rule.push(1, 1)) == [Apply(3, (1,), 1.0, 4, 0.25, 4)]
    assert rule.stats.staleness == {1: 3, 4: 1}


def test_normalised_weights_have_mean_one() -> None:
    rule = CheckedRule(Policy("each", weighting="normalised"), 2)
    weights = [updates(rule.push(0, 1))[0].weight, updates(rule.push(1, 1))[0].weight]
    assert weights == pytest.approx([1.0, 2 / (2 * 1.5)])


def test_push_that_is_older_than_the_age_is_dropped_and_answered_with_what_is_new() -> None:
    rule = CheckedRule(Policy("each", age=1), 3)
    for worker in (0, 1):
        assert len(updates(rule.push(worker, 1, 4.0))) == 1
    assert rule.push(2, 1, 4.0) == [Drop(2, 2), Release((2,), 2)]
    assert (rule.version, rule.read[2]) == (2, 2)
    assert rule.stats.data_mass == {0: 4.0, 1: 4.0}
    assert rule.stats.dropped == {2: 1}
    assert updates(rule.push(2, 2)) == [Apply(2, (2,), 1.0, 1, 1.0, 3)], "the next one is fresh"


def test_dropped_push_that_is_repeated_counts_once_before_and_after_its_answer() -> None:
    rule = CheckedRule(Policy("each", bound=0, age=0), 3)
    rule.push(0, 1)
    assert rule.push(1, 1) == [Drop(1, 1)], "the bound holds the answer"
    assert rule.push(1, 1) == []
    assert rule.missing_for(1) == [2]
    assert rule.push(2, 1) == [Drop(2, 1), Release((0,), 1), Release((1,), 1), Release((2,), 1)]
    assert rule.push(1, 1) == [Repeat(1, 1)]
    assert rule.stats.dropped == {1: 1, 2: 1}
    assert rule.version == 1


def test_dropped_round_is_finished_for_those_who_wait_for_it() -> None:
    rule = CheckedRule(Policy("first", first=1, bound=0, age=0), 2)
    assert releases(rule.push(0, 1)) == []
    assert rule.push(1, 1) == [Drop(1, 1), Release((0,), 1), Release((1,), 1)]


def test_with_an_age_one_worker_may_bring_all_of_a_cohort_and_nobody_is_held_back() -> None:
    rule = CheckedRule(Policy("first", first=3, age=0), 2)
    assert rule.push(0, 1, 2.0) == [Merge(0, 0), Release((0,), 0)]
    assert rule.push(0, 2, 3.0) == [Merge(0, 0), Release((0,), 0)]
    assert rule.push(0, 3, 5.0) == [Merge(0, 0), Apply(0, (0, 0, 0), 10.0, 1, 1.0, 1), Release((0,), 1)]
    assert rule.push(1, 1, 7.0) == [Drop(1, 1), Release((1,), 1)]
    assert rule.stats.data_mass == {0: 10.0}


def test_barrier_applies_fresh_gradients_though_there_are_too_few() -> None:
    rule = CheckedRule(Policy("first", first=5, age=0), 2)
    rule.push(0, 1)
    rule.push(0, 2)
    assert rule.pause(1) == []
    assert updates(rule.pause(0)) == [Apply(0, (0, 0), 2.0, 1, 1.0, 1)]
    assert rule.push(1, 1) == [Drop(1, 1), Release((1,), 1)]


def test_those_who_stay_fill_a_cohort_of_fresh_gradients_without_those_who_left() -> None:
    rule = CheckedRule(Policy("first", first=3, age=0), 2)
    rule.push(1, 1)
    assert rule.leave(1) == []
    assert updates(rule.push(0, 1)) == []
    assert updates(rule.push(0, 2)) == [Apply(0, (1, 0, 0), 3.0, 1, 1.0, 1)]


def test_staleness_counts_from_what_a_worker_had_read_when_it_pushed() -> None:
    rule = CheckedRule(Policy("first", first=2, weighting="inverse"), 3)
    for worker in (0, 1):
        rule.push(worker, 1)
    assert rule.push(2, 1) == [Merge(1, 2), Release((2,), 1)], "it has missed one update, and has now read that"
    assert updates(rule.push(1, 2)) == [Apply(1, (2, 1), 2.0, 2, 0.5, 2)]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_worker_stops_bound_rounds_ahead_of_the_slowest(bound: int) -> None:
    rule = CheckedRule(Policy("each", bound=bound), 2)
    for round in range(1, bound + 1):
        assert releases(rule.push(0, round)), "within the bound"
    assert not releases(rule.push(0, bound + 1))
    assert rule.missing_for(0) == [1]
    assert sorted(w for one in releases(rule.push(1, 1)) for w in one.workers) == [0, 1]


def test_ssp_with_bound_zero_is_lock_step() -> None:
    rule = CheckedRule(Policy("each", bound=0), 3)
    for round in (1, 2):
        assert not releases(rule.push(1, round))
        assert not releases(rule.push(0, round))
        released = releases(rule.push(2, round))
        assert [(one.workers, one.version) for one in released] == [((w,), 3 * round) for w in range(3)]


def test_group_steps_alone_and_reads_its_own_version() -> None:
    rule = CheckedRule(Policy("groups", ((0, 1), (2,)), weighting="inverse"), 3)
    assert releases(rule.push(2, 1)) == [Release((2,), 1)]
    assert rule.push(0, 1) == [Merge(1, 0)]
    assert rule.pull(1) == 0, "the other group's update is not seen before the own one"
    assert rule.push(1, 1) == [Merge(1, 1), Apply(1, (0, 1), 2.0, 2, 0.5, 2), Release((0, 1), 2)]


def test_bounded_groups_name_only_who_has_not_pushed() -> None:
    rule = CheckedRule(Policy("groups", ((0,), (1, 2)), bound=0), 3)
    rule.push(0, 1)
    rule.push(1, 1)
    assert rule.missing_for(0) == [2]
    assert [one.workers for one in releases(rule.push(2, 1))] == [(0,), (1, 2)]


def test_first_k_lets_everybody_go_on_at_once_and_takes_a_second_push_into_the_next_cohort() -> None:
    rule = CheckedRule(Policy("first", first=2), 3)
    assert rule.push(0, 1) == [Merge(0, 0), Release((0,), 0)]
    assert rule.push(0, 2) == [Merge(1, 0)], "held: a third would need a third buffer"
    assert rule.missing_for(0) == [1, 2]
    actions = rule.push(2, 1)
    assert updates(actions) == [Apply(0, (0, 2), 2.0, 1, 1.0, 1)]
    assert releases(actions) == [Release((0,), 1), Release((2,), 1)]


def test_first_k_with_grace_takes_those_who_come_a_little_later_and_waits_for_no_other() -> None:
    rule = CheckedRule(Policy("first", first=2, grace_s=3.0), 4)
    assert rule.push(0, 1) == [Merge(0, 0), Release((0,), 0)]
    assert rule.end_grace(0) == [], "it has not begun"
    assert rule.push(1, 1) == [Merge(0, 1), Grace(0), Release((1,), 0)]
    assert rule.push(0, 2) == [Merge(1, 0)]
    assert rule.missing_for(0) == [2, 3]
    assert rule.push(2, 1) == [Merge(0, 2), Release((2,), 0)]
    assert rule.end_grace(0) == [Apply(0, (0, 1, 2), 3.0, 1, 1.0, 1), Release((0,), 1)]
    assert rule.end_grace(0) == []
    assert "the time of grace of cohort 0 ended" in rule.story("the slot")
    assert rule.push(1, 2) == [Merge(1, 1), Grace(1), Release((1,), 1)]
    rule.push(2, 2)
    assert updates(rule.push(3, 1)) == [Apply(1, (0, 1, 2, 3), 4.0, 2, 1.0, 2)], "all have come"


def test_time_of_grace_that_has_begun_ends_although_more_workers_are_active_by_then() -> None:
    rule = CheckedRule(Policy("first", first=3, grace_s=3.0), 4)
    rule.pause(2)
    rule.pause(3)
    rule.push(2, 1)
    assert Grace(0) in rule.push(0, 1), "two are active, and two pushes are enough"
    rule.come_back(2, 0)
    rule.come_back(3, 0)
    assert updates(rule.end_grace(0)) == [Apply(0, (2, 0), 2.0, 1, 1.0, 1)]


def test_first_k_with_a_bound_names_the_slowest() -> None:
    rule = CheckedRule(Policy("first", first=3, bound=1), 4)
    rule.push(0, 1)
    rule.push(0, 2)
    rule.push(1, 1)
    rule.push(2, 1)
    assert rule.waiting() == [0]
    assert rule.missing_for(0) == [3]


def test_leaving_releases_those_who_waited_for_the_leaver() -> None:
    rule = CheckedRule(Policy("all"), 3)
    rule.push(0, 1)
    rule.push(1, 1)
    assert rule.leave(2) == [Apply(0, (0, 1), 2.0, 1, 1.0, 1), Release((0, 1), 1)]
    assert rule.push(2, 1) == [Refuse(2, "worker 2 has left")]


def test_what_a_leaver_has_pushed_still_counts() -> None:
    rule = CheckedRule(Policy("all"), 2)
    rule.push(1, 1, 5.0)
    assert rule.leave(1) == []
    assert updates(rule.push(0, 1, 3.0)) == [Apply(0, (0, 1), 8.0, 1, 1.0, 1)]


def test_slowest_that_leaves_frees_the_others() -> None:
    rule = CheckedRule(Policy("each", bound=0), 2)
    rule.push(0, 1)
    assert releases(rule.leave(1)) == [Release((0,), 1)]


@pytest.mark.parametrize(
    ("worker", "round", "samples", "why"),
    [
        (3, 1, 1.0, "not part"),
        (-1, 1, 1.0, "not part"),
        (0, 2, 1.0, "after round 0"),
        (0, 0, 1.0, "after round 0"),
        (0, 1, -1.0, "samples"),
        (0, 1, float("nan"), "samples"),
        (1, 2, 1.0, "before round 1 was answered"),
    ],
)
def test_nonsense_is_refused_with_a_reason(worker: int, round: int, samples: float, why: str) -> None:
    rule = CheckedRule(Policy("all"), 3)
    rule.push(1, 1)
    (refusal,) = rule.push(worker, round, samples)
    assert isinstance(refusal, Refuse)
    assert why in refusal.reason


def test_sum_of_pushes_counts_every_worker_behind_it() -> None:
    rule = CheckedRule(Policy("all"), 3)
    assert rule.push_sum([Pushed(2, 1, 16.0), Pushed(0, 1, 48.0)]) == [Merge(0, 2)]
    assert rule.missing_for(0) == [1]
    assert rule.push(1, 1, 1.0) == [Merge(0, 1), Apply(0, (0, 1, 2), 65.0, 1, 1.0, 1), Release((0, 1, 2), 1)]
    assert rule.stats.data_mass == {0: 48.0, 1: 1.0, 2: 16.0}


def test_repeated_sum_changes_nothing() -> None:
    rule = CheckedRule(Policy("all"), 3)
    sum_of_two = [Pushed(0, 1), Pushed(1, 1)]
    rule.push_sum(sum_of_two)
    assert rule.push_sum(sum_of_two) == []
    rule.push(2, 1)
    assert rule.push_sum(sum_of_two) == [Repeat(0, 1)]


@pytest.mark.parametrize(
    ("pushes", "why"),
    [
        ([Pushed(0, 1), Pushed(0, 1)], "twice"),
        ([Pushed(0, 1), Pushed(3, 1)], "do not step together"),
        ([Pushed(0, 1), Pushed(1, 1)], "some but not all"),
        ([Pushed(0, 1), Pushed(2, 2)], "after round 0"),
    ],
)
def test_sum_of_pushes_that_do_not_belong_together_is_refused(pushes: list[Pushed], why: str) -> None:
    rule = CheckedRule(Policy("groups", ((0, 1, 2), (3,))), 4)
    rule.push(1, 1)
    before = repr(rule.__dict__)
    (refusal,) = rule.push_sum(pushes)
    assert isinstance(refusal, Refuse)
    assert why in refusal.reason
    assert repr(rule.__dict__) == before


def test_what_was_pushed_before_a_barrier_leaves_its_worker_waiting_there() -> None:
    rule = CheckedRule(Policy("all"), 3)
    rule.pause(1)
    assert rule.push_sum([Pushed(0, 1), Pushed(1, 1)]) == [Merge(0, 0)]
    assert rule.paused == {1}
    assert [one.workers for one in releases(rule.push(2, 1))] == [(0, 1, 2)]
    assert releases(rule.push_sum([Pushed(0, 2), Pushed(2, 2)])) == [Release((0, 2), 2)]


def test_worker_at_a_barrier_holds_up_nobody() -> None:
    rule = CheckedRule(Policy("all"), 2)
    assert rule.pause(1) == []
    assert releases(rule.push(0, 1)) == [Release((0,), 1)]
    assert rule.pause(0) == [], "the barrier opens, and everybody counts again"
    assert releases(rule.push(0, 2)) == []
    assert rule.missing_for(0) == [1]


@pytest.mark.parametrize("policy", [Policy("each", bound=0), Policy("first", first=2, bound=0)], ids=["ssp", "first k"])
def test_everybody_is_level_again_after_a_barrier(policy: Policy) -> None:
    rule = CheckedRule(policy, 2)
    rule.pause(1)
    for round in (1, 2, 3):
        assert releases(rule.push(0, round))
    rule.pause(0)
    assert not releases(rule.push(0, 4))
    assert [one.workers for one in releases(rule.push(1, 1))] == [(0,), (1,)]


def test_who_waits_is_released_when_the_slowest_enters_a_barrier() -> None:
    rule = CheckedRule(Policy("each", bound=0), 3)
    rule.push(0, 1)
    assert rule.missing_for(0) == [1, 2]
    assert rule.pause(1) == []
    assert rule.missing_for(0) == [2]
    assert releases(rule.pause(2)) == [Release((0,), 1)]


def test_shards_share_the_counters_of_their_store() -> None:
    stats = Stats()
    shards = [CheckedRule(Policy("all"), 1, stats) for _ in range(3)]
    for shard in shards:
        shard.push(0, 1, 4.0)
    assert stats.updates == 3
    assert stats.data_mass == {0: 12.0}


def test_damage_is_noticed_by_check() -> None:
    rule = CheckedRule(Policy("first", first=2), 2)
    rule.push(0, 1)
    rule.answered[0] = 5
    with pytest.raises(AssertionError, match="unanswered"):
        rule.check()


# ---- learning rates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [(16.0, 16.0, 16.0, 16.0), (8.0, 24.0, 16.0, 16.0)])
def test_rate_of_a_sample_gives_each_mode_one_step_per_batch_of_all_workers(samples: tuple[float, ...]) -> None:
    """Each worker pushes as many rounds: the step mass is that of lock step, however many updates there are."""
    policies = [Policy("all"), Policy("each"), Policy("groups", ((0,), (1, 2, 3))), Policy("first", first=2)]
    for policy in policies:
        rule = CheckedRule(replace(policy, lr_scale="sample"), 4)
        for round in (1, 2, 3):
            for worker in range(4):
                rule.push(worker, round, samples[worker])
        before = rule.stats.weight_sum
        for round in (4, 5, 6):
            for worker in range(4):
                rule.push(worker, round, samples[worker])
        assert rule.stats.weight_sum - before == pytest.approx(3.0)


def test_rate_of_a_sample_counts_workers_that_have_not_pushed_and_not_those_that_have_left() -> None:
    rule = CheckedRule(Policy("each", weighting="inverse", lr_scale="sample"), 4)
    assert updates(rule.push(0, 1, 16))[0].weight == 1 / 4
    assert updates(rule.push(1, 1, 32))[0].weight == 32 / (24 * 4) / 2, "times 1/Y"
    rule.leave(2)
    rule.leave(3)
    assert updates(rule.push(0, 2, 16))[0].weight == 16 / 48 / 2


def test_rate_of_an_update_is_the_default() -> None:
    assert updates(CheckedRule(Policy("each"), 4).push(0, 1, 16))[0].weight == 1.0
    with pytest.raises(ValueError, match="it is update or sample"):
        CheckedRule(Policy("each", lr_scale="samples"), 2)  # type: ignore[arg-type]


def test_worker_that_is_alone_in_its_unit_may_push_while_it_is_at_a_barrier() -> None:
    rule = CheckedRule(Policy("groups", ((0,), (1,)), bound=1), 2)
    rule.pause(0)
    rule.push(0, 1)
    assert rule.answered[0] == 1
    rule.push(0, 2)
    assert rule.missing_for(0) == [1], "the bound holds for its own pushes"
    rule.check()


def test_rule_is_checked_once_the_tests_have_asked_for_it() -> None:
    assert isinstance(new_rule(Policy("all"), 2), CheckedRule)


def test_worker_that_comes_back_before_its_barrier_opens_is_waited_for() -> None:
    rule = CheckedRule(Policy("all"), 2)
    rule.pause(0)
    assert rule.come_back(0, 0) == []
    rule.push(1, 1)
    assert rule.missing_for(1) == [0]
    assert rule.come_back(0, 0) == [], "it says so twice"


def test_worker_at_a_barrier_does_not_go_away() -> None:
    rule = CheckedRule(Policy("all"), 2)
    rule.pause(0)
    assert rule.go_away(0) == []
    rule.pause(1)
    rule.push(1, 1)
    assert rule.missing_for(1) == [0], "the barrier has opened"


def test_worker_that_is_away_holds_up_nobody_by_the_bound_and_counts_again_when_it_is_back() -> None:
    rule = CheckedRule(Policy("each", bound=0), 2)
    rule.go_away(1)
    for round in (1, 2):
        assert releases(rule.push(0, round)) == [Release((0,), round)]
    rule.come_back(1, 1)
    rule.push(0, 3)
    assert rule.missing_for(0) == [1]


def test_no_cohort_of_the_first_pushes_counts_on_a_worker_that_is_away() -> None:
    rule = CheckedRule(Policy("first", first=2), 2)
    rule.go_away(1)
    assert updates(rule.push(0, 1)) == [Apply(0, (0,), 1.0, 1, 1.0, 1)]
    rule.come_back(1, 1)
    assert not updates(rule.push(0, 2))
