"""The settings of the rule, and the store types that are combinations of them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.consistency.weighting import find_weighting
from paceline.naming import suggestion

MergeKind = Literal["all", "each", "groups", "first"]
LrScale = Literal["update", "sample"]


@dataclass(frozen=True)
class Policy:
    """Whose pushes make one update, how far ahead a worker may run, and how much a stale update counts."""

    merge: MergeKind = "all"
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks per group, with merge ``groups``."""
    first: int = 0
    """How many pushes make an update, with merge ``first``: of distinct workers, or with an age limit, of any."""
    bound: int | None = None
    """Rounds that a worker may be ahead of the slowest; None: no limit."""
    weighting: str = "none"
    age: int | None = None
    """Missed updates beyond which a push is dropped, with merges ``each`` and ``first``; None: no limit."""
    lr_scale: LrScale = "update"
    """``update``: every update steps by the learning rate; ``sample``: by its part of one batch of every worker."""
    grace_s: float = 0.0
    """Seconds for which an update waits for further pushes after its K-th one, with merge ``first``."""

    @functools.cached_property
    def merges_rounds(self) -> bool:
        """Whether one update is made of one push of every worker of a unit: then its values wait for all of them."""
        return self.merge in ("all", "groups")

    def check(self, num_workers: int) -> None:
        """Refuse settings that make no sense for this many workers.

        Raises:
            ValueError: a setting makes no sense; the message has a value that does.
        """
        find_weighting(self.weighting)
        if self.merge not in get_args(MergeKind):
            raise ValueError(f"merge {self.merge!r} is unknown; known are {', '.join(get_args(MergeKind))}")
        if self.lr_scale not in get_args(LrScale):
            raise ValueError(f"lr_scale {self.lr_scale!r} is unknown; it is update or sample")
        if self.bound is not None and self.bound < 0:
            raise ValueError(f"the staleness bound is {self.bound}; it is a number of rounds, 0 or more")
        if self.merge == "first":
            _check_first(self.first, num_workers, self.age)
        if self.age is not None:
            _check_age(self.age, self.merge)
        if self.merge == "groups":
            _check_groups(self.groups, num_workers)
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_s is {self.grace_s}; it is a time in seconds, 0 or more")
        if self.grace_s and (self.merge != "first" or self.age is not None):
            raise ValueError(
                f"merge {self.merge!r} has no time of grace; merge 'first' (dist_ksync) without an age limit has one"
            )

    def unit_of(self, num_workers: int) -> list[int]:
        """Return for every worker the index of the unit that steps together with it."""
        if self.merge == "all":
            return [0] * num_workers
        if self.merge == "groups":
            table = {rank: index for index, group in enumerate(self.groups) for rank in group}
            return [table[rank] for rank in range(num_workers)]
        return list(range(num_workers))


def _check_first(first: int, num_workers: int, age: int | None) -> None:
    if first < 1:
        raise ValueError(f"K is {first}; it is a number of pushes, 1 or more")
    if first > num_workers and age is None:
        raise ValueError(
            f"K is {first}; without an age limit it counts workers, so it must be 1 to {num_workers}. "
            "With age=0 it counts fresh gradients, and a worker may bring several"
        )


def _check_age(age: int, merge: MergeKind) -> None:
    if age < 0:
        raise ValueError(f"the age limit is {age}; it is a number of missed updates, 0 or more")
    if merge not in ("each", "first"):
        raise ValueError(
            f"merge {merge!r} has no age limit: workers that step together would be dropped one by one, and their "
            "update would wait for pushes that are gone. Merges 'each' (dist_async, dist_ssync) and 'first' "
            "(dist_ksync) have one"
        )


def _check_groups(groups: tuple[tuple[int, ...], ...], num_workers: int) -> None:
    members = [rank for group in groups for rank in group]
    twice = sorted({rank for rank in members if members.count(rank) > 1})
    missing = sorted(set(range(num_workers)) - set(members))
    strangers = sorted(set(members) - set(range(num_workers)))
    for ranks, what in (
        (twice, "in more than one place"),
        (missing, "in no group"),
        (strangers, "not part of this job"),
    ):
        if ranks:
            raise ValueError(
                f"groups: worker {', '.join(map(str, ranks))} is {what}; every worker belongs to one group"
            )
    if any(not group for group in groups):
        raise ValueError("groups: a group has no members")


_TYPES: dict[str, Policy] = {
    "dist_sync": Policy("all"),
    "dist_async": Policy("each"),
    "dist_ssync": Policy("each", bound=0),
    "dist_gsync": Policy("groups", weighting="inverse"),
    "dist_ksync": Policy("first"),
}

DEFAULT_SSYNC_BOUND = 3


def policy_of(
    store_type: str,
    *,
    groups: tuple[tuple[int, ...], ...] = (),
    first: int | None = None,
    staleness: int | None = None,
    weighting: str | None = None,
    age: int | None = None,
    lr_scale: str | None = None,
    grace_s: float | None = None,
    num_workers: int = 1,
) -> Policy:
    """Return the policy of a canonical store type with the user's settings.

    Raises:
        ValueError: unknown type, or a setting that the type does not have or that does not fit.
    """
    if store_type not in _TYPES:
        raise ValueError(f"{store_type!r} is not a distributed store type{suggestion(store_type, _TYPES)}")
    policy = _TYPES[store_type]
    if policy.merge == "all" and weighting not in (None, "none"):
        raise ValueError(f"{store_type} has no stale updates; weighting {weighting!r} makes no sense there")
    if store_type == "dist_ssync":
        policy = dataclasses.replace(policy, bound=DEFAULT_SSYNC_BOUND if staleness is None else staleness)
    elif store_type in ("dist_gsync", "dist_ksync"):
        policy = dataclasses.replace(policy, bound=staleness)
    if policy.merge == "groups":
        if not groups:
            raise ValueError("dist_gsync needs groups: a groups file (--groups FILE) or groups=[[0, 1], [2, 3]]")
        policy = dataclasses.replace(policy, groups=groups)
    if policy.merge == "first":
        policy = dataclasses.replace(policy, first=first if first is not None else max(1, num_workers // 2))
    if weighting is not None:
        policy = dataclasses.replace(policy, weighting=weighting)
    scale: LrScale = lr_scale or "update"  # type: ignore[assignment]
    policy = dataclasses.replace(policy, age=age, lr_scale=scale, grace_s=grace_s or 0.0)
    policy.check(num_workers)
    return policy
