"""Groups that change, and workers that go away, come back, leave and rejoin: several slots, messages in any order."""

from __future__ import annotations

from collections import Counter, deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.consistency import Apply, CheckedRule, Policy, Refuse, Release, Rule

WORKERS, SLOTS, ROUNDS = 5, 3, 4
Groups = tuple[tuple[int, ...], ...]


@st.composite
def partitions(draw: st.DrawFn) -> Groups:
    labels = draw(st.lists(st.integers(0, 2), min_size=WORKERS, max_size=WORKERS))
    return tuple(tuple(w for w in range(WORKERS) if labels[w] == label) for label in sorted(set(labels)))


class Job(RuleBasedStateMachine):
    """Workers that push, change groups, go away, come back, leave and rejoin; slots get their messages at any time.

    Workers that are away may push; who else is in the cohorts of these pushes differs between slots.
    """

    def __init__(self) -> None:
        super().__init__()
        groups = ((0, 1), (2, 3, 4))
        self.rules = [CheckedRule(Policy("groups", groups=groups), WORKERS) for _ in range(SLOTS)]
        self.groups: list[Groups] = [groups]
        self.generation = [0] * WORKERS
        self.round = [0] * WORKERS
        self.before = [0] * WORKERS
        """Rounds of earlier processes of each worker."""
        self.unanswered: list[set[int]] = [set() for _ in range(WORKERS)]
        self.left: set[int] = set()
        self.away: set[int] = set()
        self.phases = 0
        self.phase = [0] * WORKERS
        self.guests: set[tuple[int, int]] = set()
        self.ways: dict[tuple[int, int], deque[tuple[str, int]]] = {
            (worker, slot): deque() for worker in range(WORKERS) for slot in range(SLOTS)
        }
        self.open: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(SLOTS)]
        self.cohorts: list[Counter[frozenset[tuple[int, int]]]] = [Counter() for _ in range(SLOTS)]

    def is_idle(self, worker: int) -> bool:
        return not self.unanswered[worker] and worker not in self.left

    def send(self, worker: int, kind: str, number: int = 0) -> None:
        for slot in range(SLOTS):
            self.ways[worker, slot].append((kind, number))

    @rule(worker=st.integers(0, WORKERS - 1))
    def push(self, worker: int) -> None:
        if self.is_idle(worker):
            self.round[worker] += 1
            self.unanswered[worker] = set(range(SLOTS))
            self.send(worker, "push", self.round[worker] - self.before[worker])
            if worker in self.away:
                self.guests.add((worker, self.round[worker]))

    @precondition(lambda self: len(self.groups) < 4)
    @rule(groups=partitions())
    def announce(self, groups: Groups) -> None:
        self.groups.append(groups)

    @rule(worker=st.integers(0, WORKERS - 1), newest=st.booleans())
    def learn(self, worker: int, newest: bool) -> None:
        """Move between two rounds, perhaps without having heard of the newest groups."""
        known = len(self.groups) - 1 if newest else min(self.generation[worker] + 1, len(self.groups) - 1)
        if self.is_idle(worker) and known > self.generation[worker]:
            self.generation[worker] = known
            self.send(worker, "regroup", known)

    @rule(worker=st.integers(0, WORKERS - 1))
    def go_away(self, worker: int) -> None:
        if self.is_idle(worker):
            self.away.add(worker)
            self.send(worker, "go away")

    @rule()
    def begin_phase(self) -> None:
        self.phases += 1

    @rule(worker=st.integers(0, WORKERS - 1), newest=st.booleans())
    def come_back(self, worker: int, newest: bool) -> None:
        """Come to a phase between two rounds, perhaps without having heard of the newest one."""
        known = self.phases if newest else min(self.phase[worker] + 1, self.phases)
        if self.is_idle(worker) and known > self.phase[worker]:
            self.phase[worker] = known
            self.away.discard(worker)
            self.send(worker, "come back", known)

    @rule(worker=st.integers(0, WORKERS - 1))
    def leave(self, worker: int) -> None:
        if len(self.left) < 2:
            self.end(worker)

    def end(self, worker: int) -> None:
        if self.is_idle(worker):
            self.left.add(worker)
            self.send(worker, "leave")

    @rule(worker=st.integers(0, WORKERS - 1))
    def rejoin(self, worker: int) -> None:
        """All slots know of the other process before anybody hears of the phase in which it counts."""
        if worker in self.left and not any(self.ways[worker, slot] for slot in range(SLOTS)):
            self.phases += 1
            self.left.discard(worker)
            self.away.discard(worker)
            self.before[worker], self.phase[worker] = self.round[worker], self.phases
            for slot, one in enumerate(self.rules):
                self.carry_out(slot, one.rejoin(worker, self.phases))
                assert one.rejoin(worker, self.phases) == []

    @rule(worker=st.integers(0, WORKERS - 1), slot=st.integers(0, SLOTS - 1))
    def deliver(self, worker: int, slot: int) -> None:
        if not self.ways[worker, slot]:
            return
        kind, number = self.ways[worker, slot].popleft()
        one = self.rules[slot]
        if kind == "push":
            actions = one.push(worker, number)
        elif kind == "regroup":
            actions = one.regroup(worker, number, self.groups[number])
        elif kind == "go away":
            actions = one.go_away(worker)
        elif kind == "come back":
            actions = one.come_back(worker, number)
        else:
            actions = one.leave(worker)
        self.carry_out(slot, actions)

    def carry_out(self, slot: int, actions: list[object]) -> None:
        pushed = self.rules[slot].pushed
        for action in actions:
            assert not isinstance(action, Refuse), action
            if isinstance(action, Apply):
                self.cohorts[slot][frozenset((w, self.before[w] + pushed[w]) for w in action.workers)] += 1
            elif isinstance(action, Release):
                for released in action.workers:
                    self.unanswered[released].discard(slot)

    @invariant()
    def mates_that_go_on_read_the_same_version(self) -> None:
        for one in self.rules:
            one.check()

    def teardown(self) -> None:
        """Everybody trains for some more rounds and leaves: nobody waits for ever, and all slots saw the same."""
        goal = [done if worker in self.left else done + ROUNDS for worker, done in enumerate(self.round)]
        for _ in range(20 * ROUNDS * WORKERS):
            for worker in range(WORKERS):
                self.learn(worker, True)
                self.come_back(worker, True)
                if self.round[worker] < goal[worker]:
                    self.push(worker)
                else:
                    self.end(worker)
                for slot in range(SLOTS):
                    while self.ways[worker, slot]:
                        self.deliver(worker, slot)
        waiting = {worker: slots for worker, slots in enumerate(self.unanswered) if slots}
        assert not waiting, "\n".join(one.story("a slot") for one in self.rules)
        assert self.round == goal
        first, second, third = map(self.without_guests, self.cohorts)
        assert first == second == third
        for cohorts in self.cohorts:
            counted = Counter(part for cohort in cohorts.elements() for part in cohort)
            assert counted == Counter((w, r) for w in range(WORKERS) for r in range(1, self.round[w] + 1))

    def without_guests(self, cohorts: Counter[frozenset[tuple[int, int]]]) -> Counter[frozenset[tuple[int, int]]]:
        """Return the cohorts without the pushes of workers that were away."""
        found = Counter(cohort - self.guests for cohort in cohorts.elements())
        del found[frozenset()]
        return found


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)


def gsync(*groups: tuple[int, ...], **options: object) -> Rule:
    workers = max(worker for group in groups for worker in group) + 1
    return CheckedRule(Policy("groups", groups=groups, **options), workers)  # type: ignore[arg-type]


def updates(actions: list[object]) -> list[tuple[int, ...]]:
    return [action.workers for action in actions if isinstance(action, Apply)]


def test_old_group_goes_on_without_who_has_moved_and_the_new_one_waits_for_who_is_to_come() -> None:
    one = gsync((0, 1), (2,))
    assert not one.units.has_changed
    assert updates([*one.push(0, 1)]) == []
    assert updates([*one.push(1, 1)]) == [(0, 1)]
    assert one.push(0, 2)
    assert updates([*one.regroup(1, 1, ((0,), (1, 2)))]) == [(0,)]
    assert updates([*one.push(1, 2)]) == []
    assert one.units.has_changed
    assert one.missing_for(1) == [2]
    assert updates([*one.push(2, 1)]) == [(2,)], "its old group"
    assert one.regroup(2, 1, ((0,), (1, 2))) == []
    assert updates([*one.push(2, 2)]) == [(1, 2)]
    assert one.read[1] == one.read[2] == 4


def test_worker_that_dies_before_it_moves_is_not_waited_for() -> None:
    one = gsync((0,), (1,), (2,))
    one.regroup(0, 1, ((0, 1), (2,)))
    assert updates([*one.push(0, 1)]) == []
    assert updates([*one.leave(1)]) == [(0,)]


def test_no_cohort_waits_for_a_worker_that_is_away_and_it_may_push_along() -> None:
    one = gsync((0, 1, 2), (3,))
    one.push(0, 1)
    one.push(1, 1)
    assert updates([*one.go_away(2)]) == [(0, 1)]
    assert one.push(2, 1)
    assert one.missing_for(2) == [0, 1]
    one.push(0, 2)
    assert updates([*one.push(1, 2)]) == [(0, 1, 2)]
    one.go_away(0)
    one.go_away(1)
    assert updates([*one.push(2, 2)]) == [(2,)], "nobody is there for whom it could wait"
    assert "away: workers 0-2" in one.story("the slot")
    assert one.leave(2) == one.come_back(2, 1) == one.go_away(2) == []


def test_worker_that_comes_back_waits_for_those_of_its_phase_and_those_to_come() -> None:
    one = gsync((0, 1, 2))
    one.go_away(0)
    one.push(1, 1)
    assert one.come_back(0, 1) == []
    assert one.come_back(0, 1) == [], "it says so twice"
    assert updates([*one.push(0, 1)]) == []
    assert sorted(one.missing_for(0)) == [2], "worker 1 waits for it too"
    assert updates([*one.push(2, 1)]) == [(1, 2)], "of the phase before"
    assert one.missing_for(0) == [1, 2]
    assert updates([*one.go_away(1)]) == [], "it is still to come to this phase"
    one.come_back(2, 1)
    assert updates([*one.push(2, 2)]) == []
    one.come_back(1, 1)
    assert updates([*one.push(1, 2)]) == [(0, 1, 2)]
    assert "worker 2 came back in phase 1" in one.story("the slot")


def test_a_barrier_does_not_open_before_those_come_that_are_away() -> None:
    """They wait for something else, and would wait there for pushes of those at the barrier."""
    one = gsync((0, 1))
    one.go_away(0)
    one.pause(1)
    assert one.paused == {1}
    assert updates([*one.push(0, 1)]) == [(0,)]
    one.pause(0)
    assert one.paused == one.away == set()
    one.push(0, 2)
    assert one.missing_for(0) == [1]


def test_move_that_is_repeated_changes_nothing() -> None:
    one = gsync((0,), (1,))
    one.regroup(0, 1, ((0, 1),))
    assert one.push(0, 1)
    assert one.regroup(0, 1, ((0, 1),)) == []
    assert one.waiting() == [0]


@pytest.mark.parametrize(
    ("one", "groups", "why"),
    [
        (gsync((0, 1), (2,), bound=1), ((0,), (1, 2)), "without a bound"),
        (CheckedRule(Policy(), 3), ((0,), (1, 2)), "only groups"),
        (gsync((0, 1), (2,)), ((2,), (1,)), "do not name worker 0 once"),
        (gsync((0, 1), (2,)), ((0, 1), (1, 2)), "nobody twice"),
        (gsync((0, 1), (2,)), ((0, 1), (2, 3)), "does not exist"),
    ],
)
def test_groups_that_make_no_sense_are_refused(one: Rule, groups: Groups, why: str) -> None:
    [action] = one.regroup(0, 1, groups)
    assert isinstance(action, Refuse)
    assert why in action.reason


def test_worker_cannot_move_while_it_waits() -> None:
    one = gsync((0, 1))
    one.push(0, 1)
    [action] = one.regroup(0, 1, ((0,), (1,)))
    assert isinstance(action, Refuse)
    assert "before round 1 was answered" in action.reason
    one.leave(1)
    [action] = one.regroup(1, 1, ((0,),))
    assert isinstance(action, Refuse)
    assert "has left" in action.reason


def test_others_wait_for_a_worker_that_has_rejoined_from_their_first_round_in_its_phase_on() -> None:
    one = gsync((0, 1))
    one.push(0, 1)
    one.push(1, 1)
    one.leave(1)
    assert updates(one.push(0, 2)) == [(0,)]
    assert one.rejoin(1, 1) == []
    assert updates(one.push(0, 3)) == [(0,)], "it has not come to that phase"
    one.come_back(0, 1)
    assert updates(one.push(1, 1)) == []
    assert updates(one.push(0, 4)) == [(0, 1)]
    assert "worker 1 joined again, as another process, in phase 1" in one.story("a slot")
