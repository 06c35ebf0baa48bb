"""What is compared: modes of synchronising, and the machines that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, get_args

from paceline.consistency import Policy, policy_of
from paceline.hetero import Speed
from paceline.sim.simulation import ShareKind

#: Seconds of a batch, by class of workers.
CLASSES = (0.15, 0.3, 0.6)
BATCH = 32
#: Part of a batch's time that does not depend on its samples.
FIXED = 0.2
#: Sigma of the log-normal noise of each batch.
JITTER = 0.1
#: Rounds that a worker of dist_ssync may be ahead.
BOUND = 3
#: How many times as long a straggler takes.
STRAGGLER = 8

#: ``classes``: as many workers of each class; ``alike``: all of the middle one; ``straggler``: all of the fastest one,
#: but for one that is much slower.
Kind = Literal["classes", "alike", "straggler"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Machines:
    """The workers' machines, in order of rank the fastest first."""

    per_class: int = 4
    kind: Kind = "classes"

    @property
    def count(self) -> int:
        """Number of workers."""
        return self.per_class * len(CLASSES)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of equal speed."""
        by_time = groupby(enumerate(self._seconds), key=lambda one: one[1])
        return tuple(tuple(rank for rank, _ in ranks) for _, ranks in by_time)

    @property
    def speeds(self) -> list[Speed]:
        """Speed of each worker."""
        return [Speed(FIXED * t, (1 - FIXED) * t / BATCH) for t in self._seconds]

    @property
    def _seconds(self) -> list[float]:
        if self.kind == "alike":
            return [CLASSES[1]] * self.count
        if self.kind == "straggler":
            return [CLASSES[0]] * (self.count - 1) + [STRAGGLER * CLASSES[0]]
        return [seconds for seconds in CLASSES for _ in range(self.per_class)]


@dataclass(frozen=True)
class Mode:
    """A type of store, its options and the workers' shares of the data."""

    name: str
    store_type: str
    shares: ShareKind = "equal"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the store."""

    def options_on(self, machines: Machines) -> dict[str, Any]:
        """Return the store's options: workers of one class are a group, and as many pushes make an update."""
        own: dict[str, dict[str, Any]] = {
            "dist_gsync": {"groups": machines.groups},
            "dist_ksync": {"k": machines.per_class},
        }
        return {**self.options, **own.get(self.store_type, {})}

    def policy(self, machines: Machines) -> Policy:
        """Return the policy that the store makes of its options."""
        options = self.options_on(machines)
        first = options.pop("k", None)
        return policy_of(self.store_type, first=first, num_workers=machines.count, **options)


#: What the table of three columns has.
MODES = {
    one.name: one
    for one in (
        Mode("BSP", "dist_sync"),
        Mode("LB-BSP", "dist_sync", "measured"),
        Mode("ASP", "dist_async"),
        Mode("SSP 3", "dist_ssync", options={"staleness": BOUND}),
        Mode("GSP 1/Y", "dist_gsync", options={"weighting": "inverse"}),
        Mode("GSP 1/Y +shares", "dist_gsync", "data", {"weighting": "inverse"}),
        Mode("GSP", "dist_gsync", options={"weighting": "none"}),
        Mode("GSP +shares", "dist_gsync", "data", {"weighting": "none"}),
        Mode("K-sync", "dist_ksync", "pool"),
    )
}

#: What dist_auto is compared with.
ALL_MODES = MODES | {
    one.name: one
    for one in (
        Mode("ASP 1/Y", "dist_async", options={"weighting": "inverse"}),
        Mode("ASP +pool", "dist_async", "pool"),
        Mode("ASP 1/Y +pool", "dist_async", "pool", {"weighting": "inverse"}),
        Mode("GSP +pool", "dist_gsync", "pool", {"weighting": "none"}),
        Mode("GSP 1/Y +pool", "dist_gsync", "pool", {"weighting": "inverse"}),
    )
}
