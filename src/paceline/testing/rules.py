"""A rule that looks for damage after every event."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.consistency import Action, Pushed, Rule


class CheckedRule(Rule):
    """The rule of a shard, with its invariants asserted after every event."""

    def push_sum(self, pushes: Sequence[Pushed]) -> list[Action]:
        """Take a sum of pushes, and check."""
        actions = super().push_sum(pushes)
        self.check()
        return actions

    def leave(self, worker: int) -> list[Action]:
        """Take a worker out, and check."""
        actions = super().leave(worker)
        self.check()
        return actions

    def pause(self, worker: int) -> list[Action]:
        """Note that a worker enters a barrier, and check."""
        actions = super().pause(worker)
        self.check()
        return actions

    def pull(self, worker: int) -> int:
        """Note that a worker reads, and check."""
        version = super().pull(worker)
        self.check()
        return version
