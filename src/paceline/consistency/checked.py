"""A rule that checks itself, and the one place where rules are made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from paceline.consistency.actions import Action, Pushed
from paceline.consistency.activity import Cohort
from paceline.consistency.objections import objection
from paceline.consistency.policy import Policy
from paceline.consistency.rule import Rule
from paceline.consistency.stats import Stats
from paceline.naming import workers_text

Event = TypeVar("Event", bound=Callable[..., Any])

_made: type[Rule] = Rule


def _then_checked(event: Event) -> Event:
    """Return an event of a rule after which the rule is checked."""

    @functools.wraps(event)
    def taken(self: CheckedRule, *arguments: Any) -> Any:
        found = event(self, *arguments)
        self._check()
        return found

    return cast(Event, taken)


class CheckedRule(Rule):
    """The rule of a slot that asserts its invariants after every event; a failure tells the slot's story."""

    leave = _then_checked(Rule.leave)
    regroup = _then_checked(Rule.regroup)
    pause = _then_checked(Rule.pause)
    go_away = _then_checked(Rule.go_away)
    come_back = _then_checked(Rule.come_back)
    rejoin = _then_checked(Rule.rejoin)
    pull = _then_checked(Rule.pull)
    end_grace = _then_checked(Rule.end_grace)

    def take(self, pushes: Sequence[Pushed]) -> list[Action]:
        """Take a sum of pushes, and check, also that there is no objection to it."""
        assert not (reason := objection(self, pushes)), f"a push was not checked: {reason}"
        actions = super().take(pushes)
        self._check()
        return actions

    def _check(self) -> None:
        try:
            self.check()
        except AssertionError as error:
            raise AssertionError(f"the rule of a slot broke an invariant: {error}\n{self.story('the slot')}") from None

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: one does not hold.
        """
        for worker, last in enumerate(self.pushed):
            assert self.answered[worker] <= last <= self.answered[worker] + 1, f"worker {worker}: unanswered pushes"
            assert self.finished[worker] <= last, f"worker {worker}: finished a round that it has not pushed"
            assert 0 <= self.read[worker] <= self.version, f"worker {worker}: read a version that does not exist"
            assert self._activity.level[worker] <= self.finished[worker], f"worker {worker}: counts from a later round"
        assert self.paused | self.away <= self.live, "a worker that has left is paused or away"
        assert not self.paused & self.away, "a worker at a barrier is away"
        kept = [worker for worker in self.waiting() if self._may_go_on(worker)]
        assert not kept, f"{workers_text(kept)} may go on but got no answer"
        for cohort in self._open:
            self._check_open(cohort)
        if self.policy.merge == "first":
            assert len(self._open) <= (2 if self.policy.age is None else 1), "too many open cohorts"

    def _check_open(self, cohort: Cohort) -> None:
        assert cohort.workers, "an open cohort is empty"
        assert not self._is_complete(cohort), "a complete cohort was not applied"
        assert not cohort.is_over, "a cohort whose time of grace has ended is open"
        assert set(cohort.workers) == set(cohort.samples), "a cohort has samples of other workers than its own"
        if self.policy.age is None:
            assert len(cohort.workers) == len(cohort.samples), "a cohort counts a worker twice"
        else:
            # Only the one open cohort moves the version, so a push that was fresh when it joined stays fresh.
            assert self.version - cohort.oldest <= self.policy.age, "an open cohort holds a push that is too old"


def check_every_rule() -> None:
    """Let all rules that this process makes from now on check themselves."""
    global _made
    _made = CheckedRule


def new_rule(policy: Policy, num_workers: int, stats: Stats | None = None) -> Rule:
    """Return the rule of a new slot: a :class:`Rule`, or a :class:`CheckedRule` after :func:`check_every_rule`.

    Raises:
        ValueError: the policy does not fit this many workers.
    """
    return _made(policy, num_workers, stats)
