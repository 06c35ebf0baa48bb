"""Which workers have left a store, and which wait at its barrier."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.consistency import Groups, Policy, Rule, Stats, new_rule


class Presence:
    """The workers of a store.

    Args:
        num_workers: of the job.
        left: workers for whom nobody waits from the start.

    Attributes:
        at_barrier: workers that have pushed nothing since they came to a barrier.
    """

    def __init__(self, num_workers: int, left: Iterable[int] = ()) -> None:
        self.num_workers = num_workers
        self.at_barrier: set[int] = set()
        self._left, self._paused = set(left), set[int]()
        self._moved: dict[int, tuple[int, Groups]] = {}
        """By worker that has changed its group, the generation and its groups."""

    @property
    def present(self) -> set[int]:
        """The workers that have not left."""
        return set(range(self.num_workers)) - self._left

    def leave(self, worker: int) -> None:
        """Note that a worker leaves the store."""
        self._left.add(worker)
        self._paused.discard(worker)
        self._open_barrier()

    def pause(self, worker: int) -> None:
        """Note that a worker enters a barrier."""
        self.at_barrier.add(worker)
        self._paused.add(worker)
        self._open_barrier()

    def regroup(self, worker: int, generation: int, groups: Groups) -> None:
        """Note that a worker has moved to its group of a generation."""
        self._moved[worker] = generation, groups

    def _open_barrier(self) -> None:
        if len(self._paused | self._left) == self.num_workers:
            self._paused = set()

    def new_rule(self, policy: Policy, stats: Stats) -> Rule:
        """Return the rule of a new bucket: it knows who has left or moved, and who waits at a barrier."""
        rule = new_rule(policy, self.num_workers, stats)
        for worker in self._left:
            rule.leave(worker)
        for worker, (generation, groups) in sorted(self._moved.items(), key=lambda one: one[1][0]):
            rule.regroup(worker, generation, groups)
        for worker in self._paused:
            rule.pause(worker)
        return rule
