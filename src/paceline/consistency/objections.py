"""Reasons for which a rule refuses a push. A refused push leaves the rule as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.consistency.actions import Pushed
from paceline.consistency.policy import Policy


class Progress(Protocol):
    """The parts of a rule that its checks read.

    Attributes:
        policy: its settings.
        live: workers that have not left.
        pushed: last round that arrived, per worker.
        answered: last round that was answered, per worker.
        unit: for each worker, the unit that steps together with it.
    """

    policy: Policy
    live: set[int]
    pushed: list[int]
    answered: list[int]
    unit: list[int]


def objection(rule: Progress, pushes: Sequence[Pushed]) -> str:
    """Return why a rule would refuse a push, or a sum of pushes, or an empty string."""
    for one in pushes:
        worker, round = one.worker, one.round
        if not 0 <= worker < len(rule.pushed):
            return f"worker {worker} is not part of this job"
        if worker not in rule.live:
            return f"worker {worker} has left"
        if round < 1 or round > rule.pushed[worker] + 1:
            return f"round {round} of worker {worker} came after round {rule.pushed[worker]}"
        if round > rule.pushed[worker] > rule.answered[worker]:
            return f"round {round} of worker {worker} came before round {round - 1} was answered"
        if not 0 <= one.samples < float("inf"):
            return f"a push of {one.samples} samples: the number must be finite and not negative"
    if len(pushes) == 1:
        return ""
    workers = [one.worker for one in pushes]
    if len(set(workers)) < len(workers):
        return f"a sum over workers {workers} counts one of them twice"
    if len({rule.unit[worker] for worker in workers}) > 1:
        return f"workers {workers} do not step together; their pushes cannot be summed"
    if len({one.round <= rule.pushed[one.worker] for one in pushes}) > 1:
        return f"some but not all of the pushes of workers {workers} were seen before"
    return ""


def objection_to_regrouping(rule: Progress, worker: int, groups: Sequence[Sequence[int]]) -> str:
    """Return why a rule would refuse to let a worker step with other groups, or an empty string."""
    members = [rank for group in groups for rank in group]
    if rule.policy.merge != "groups" or rule.policy.bound is not None:
        return "only groups without a bound can change"
    if worker not in rule.live:
        return f"worker {worker} has left"
    if rule.pushed[worker] > rule.answered[worker]:
        return f"worker {worker} changes its group before round {rule.pushed[worker]} was answered"
    if members.count(worker) != 1 or len(set(members)) < len(members):
        return f"groups {[list(group) for group in groups]} do not name worker {worker} once, and nobody twice"
    strangers = sorted(set(members) - set(range(len(rule.pushed))))
    return f"groups name worker {strangers[0]}, which does not exist" if strangers else ""
