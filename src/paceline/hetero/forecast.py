"""Worth of each way of synchronising on measured machines: samples per second, and the worth of a sample.

Rates follow from the times of steps. Workers in lock step make one round in the mean time of the slowest step plus an
exchange: pushes and answers of all, and an update. Workers that do not wait make steps at their own pace, unless the
link or the servers are slower: a link takes pushes and answers side by side, servers make one update after the other.

A sample of a stale gradient moves the model less well than one of a fresh gradient at each mode's best learning rate.
:data:`STALE` is that part. It is a rough mean of simulations (``python -m benchmarks.regimes``), which scatter widely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.consistency import Policy
from paceline.hetero.batch_shares import fastest_split
from paceline.hetero.groups import Groups
from paceline.hetero.measured import Measured

#: Worth of a sample where workers do not wait for all others, relative to lock step.
STALE = 0.92


@dataclass(frozen=True)
class Forecast:
    """A way of synchronising, and its worth."""

    store_type: str
    policy: Policy
    shares: str
    """``equal``, ``measured`` or ``pool``."""
    samples_per_s: float
    worth: float = 1.0
    """Worth of a sample, relative to lock step."""

    @property
    def score(self) -> float:
        """Samples of lock step that one second is worth."""
        return self.samples_per_s * self.worth


def lock_step(measured: Measured, *, by_speed: bool) -> Forecast:
    """Return ``dist_sync`` with equal batches, or with batches by speed."""
    count, total = len(measured.workers), measured.batch * len(measured.workers)
    parts = fastest_split(total, measured.workers) if by_speed else [measured.batch] * count
    times = [speed.seconds(part) for speed, part in zip(measured.workers, parts, strict=True)]
    round_s = measured.noise.slowest(times) + measured.exchange_s
    return Forecast("dist_sync", Policy("all"), "measured" if by_speed else "equal", total / round_s)


def first_k(measured: Measured, first: int) -> Forecast:
    """Return ``dist_ksync``, or with K = 1 ``dist_async``: no worker waits, and K pushes make an update."""
    free = sum(1 / (one * measured.noise.mean + measured.push_s) for one in measured.seconds)
    rate = _limited(free, _link_limit(measured), first / measured.update_s if measured.update_s else 0.0)
    if first == 1:
        return _stale(measured, "dist_async", Policy("each"), rate)
    return _stale(measured, "dist_ksync", Policy("first", first=first), rate)


def in_groups(measured: Measured, groups: Groups) -> Forecast:
    """Return ``dist_gsync``: lock step within groups of like speed."""
    times = measured.seconds
    cycles = [
        measured.noise.slowest([times[rank] for rank in group]) + len(group) * measured.push_s + measured.update_s
        for group in groups
    ]
    free = sum(len(group) / cycle for group, cycle in zip(groups, cycles, strict=True))
    per_update = free / sum(1 / cycle for cycle in cycles)
    rate = _limited(free, _link_limit(measured), per_update / measured.update_s if measured.update_s else 0.0)
    return _stale(measured, "dist_gsync", Policy("groups", groups=groups), rate)


def smallest_first(measured: Measured) -> int:
    """Return K: 1, or as many pushes per update as keep the servers' optimizer below half load, if N/2 are enough."""
    count = len(measured.workers)
    free = sum(1 / (one * measured.noise.mean + measured.push_s) for one in measured.seconds)
    return min(max(round(2 * free * measured.update_s), 1), max(1, count // 2))


def _stale(measured: Measured, store_type: str, policy: Policy, rate: float) -> Forecast:
    shares = "pool" if measured.hands_out else "equal"
    # The rate of a sample stays the same as in lock step.
    return Forecast(store_type, replace(policy, lr_scale="sample"), shares, rate * measured.batch, STALE)


def _link_limit(measured: Measured) -> float:
    """Return the pushes per second that links carry, 0: no limit. Pushes and answers pass each other."""
    return 2 / measured.push_s if measured.push_s else 0.0


def _limited(rate: float, *limits: float) -> float:
    """Return a rate under limits (0: none). Near a limit, queues cost a part of both."""
    return float(sum(one**-4.0 for one in (rate, *limits) if one > 0) ** -0.25)
