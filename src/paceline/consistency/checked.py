"""A rule that checks itself, and the one place where rules are made."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.consistency.actions import Action, Pushed
from paceline.consistency.policy import Policy
from paceline.consistency.rule import Rule
from paceline.consistency.stats import Stats
from paceline.consistency.units import Groups

_made: type[Rule] = Rule


class CheckedRule(Rule):
    """The rule of a slot that asserts its invariants after every event; a failure tells the slot's story."""

    def push_sum(self, pushes: Sequence[Pushed]) -> list[Action]:
        """Take a sum of pushes, and check."""
        actions = super().push_sum(pushes)
        self._check()
        return actions

    def leave(self, worker: int) -> list[Action]:
        """Note that a worker has left, and check."""
        actions = super().leave(worker)
        self._check()
        return actions

    def regroup(self, worker: int, generation: int, groups: Groups) -> list[Action]:
        """Let a worker step with another group, and check."""
        actions = super().regroup(worker, generation, groups)
        self._check()
        return actions

    def pause(self, worker: int) -> list[Action]:
        """Note that a worker enters a barrier, and check."""
        actions = super().pause(worker)
        self._check()
        return actions

    def pull(self, worker: int) -> int:
        """Note that a worker reads, and check."""
        version = super().pull(worker)
        self._check()
        return version

    def _check(self) -> None:
        try:
            self.check()
        except AssertionError as error:
            raise AssertionError(f"the rule of a slot broke an invariant: {error}\n{self.story('the slot')}") from None


def check_every_rule() -> None:
    """Let all rules that this process makes from now on check themselves."""
    global _made
    _made = CheckedRule


def new_rule(policy: Policy, num_workers: int, stats: Stats | None = None) -> Rule:
    """Return the rule of a new slot: a :class:`Rule`, or a :class:`CheckedRule` after :func:`check_every_rule`.

    Args:
        policy: merge, bound, weighting and age limit.
        num_workers: ranks are 0 to ``num_workers - 1``.
        stats: counters, shared by the slots of a store.

    Raises:
        ValueError: the policy does not fit this many workers.
    """
    return _made(policy, num_workers, stats)
