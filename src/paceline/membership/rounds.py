"""Workers that train fewer rounds than others. Pure.

The servers wait neither for a worker that has left nor for one at a barrier: the others train on without it, in every
mode. That may be meant, or a loop that ended early, or a batch that raised an error which the script swallowed. So the
log says it once for each worker when it happens, and at the end how many rounds each has trained. With a pool of
samples unequal rounds are the purpose; then there is no line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from paceline.membership.effects import Action, MemberKey, Warn, describe_workers
from paceline.membership.roster import MemberRecord


class TrainedRounds:
    """Lines of the log about unequal rounds."""

    def __init__(self) -> None:
        self._said: set[int] = set()

    def check(self, workers: Sequence[MemberRecord], at_barrier: Collection[MemberKey]) -> list[Action]:
        """Return a line for each worker without which others have begun to train on.

        Args:
            workers: the workers of the job.
            at_barrier: the members that wait there.
        """
        training = [one for one in workers if one.live and _key(one) not in at_barrier]
        first = max(training, key=lambda one: one.round, default=None)
        behind = [] if first is None else [one for one in workers if one.round < first.round and not one.dead]
        found = [one for one in behind if (one.left or _key(one) in at_barrier) and one.member.rank not in self._said]
        self._said.update(one.member.rank for one in found)
        return [Warn(f"{one} {_what(one)}; the others train on without it ({_at(first)})") for one in found if first]

    def summary(self, workers: Sequence[MemberRecord]) -> list[Action]:
        """Return a line about how many rounds each worker has trained, if not all have trained as many."""
        ranks = defaultdict(list)
        for one in workers:
            ranks[one.round].append(one.member.rank)
        told = [f"{round} by {describe_workers(sorted(found))}" for round, found in sorted(ranks.items(), reverse=True)]
        return [Warn(f"not all workers have trained as many rounds: {'; '.join(told)}")] if len(told) > 1 else []


def _key(one: MemberRecord) -> MemberKey:
    return one.member.role, one.member.rank


def _what(one: MemberRecord) -> str:
    return f"left the job after round {one.round}" if one.left else f"waits at a barrier after round {one.round}"


def _at(one: MemberRecord) -> str:
    return f"worker {one.member.rank} is in round {one.round}"
