"""Counters that every store reports, so that comparisons between modes are honest."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace


@dataclass
class Stats:
    """Counters over the updates of a store, or of one slot of it.

    A slot that is cut in two leaves its counters to both, and two slots that are joined have the counters of one: so
    the mean over slots is the same as without cuts.
    """

    updates: int = 0
    skipped: int = 0
    """Updates that a worker asked not to make: counted, but without effect."""
    inverse_sum: float = 0.0
    """Sum of 1/staleness."""
    weight_sum: float = 0.0
    """Sum of the weights of all updates; times the learning rate it is the step mass."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many updates had which staleness: exact below 64, above that rounded down by at most 3 %."""
    data_mass: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Samples per worker that reached the model, each times its update's weight."""
    dropped: Counter[int] = field(default_factory=Counter)
    """Pushes per worker that were too old to count; their total is ``dropped.total()``."""
    step_mass: float = 0.0
    """Sum of the weights of all updates, each times its learning rate."""
    store: Stats | None = None
    """Counters of the whole store, whose updates weightings look at; None: these are all."""

    def seen(self, staleness: int) -> tuple[int, float]:
        """Count an update and return (updates, sum of 1/staleness) so far, of the store if that is known."""
        self.updates += 1
        self.inverse_sum += 1.0 / staleness
        self.staleness[bin_of(staleness)] += 1
        if self.store is None:
            return self.updates, self.inverse_sum
        self.store.updates += 1
        self.store.inverse_sum += 1.0 / staleness
        return self.store.updates, self.store.inverse_sum

    def copy(self) -> Stats:
        """Return counters that go on from these, in the same store."""
        data_mass = defaultdict(float, self.data_mass)
        return replace(self, staleness=Counter(self.staleness), data_mass=data_mass, dropped=Counter(self.dropped))

    def add(self, other: Stats) -> None:
        """Add other counters to these."""
        self.updates += other.updates
        self.skipped += other.skipped
        self.inverse_sum += other.inverse_sum
        self.weight_sum += other.weight_sum
        self.step_mass += other.step_mass
        self.staleness.update(other.staleness)
        self.dropped.update(other.dropped)
        for worker, mass in other.data_mass.items():
            self.data_mass[worker] += mass


def bin_of(staleness: int) -> int:
    """Return the entry of the histogram: the six leading bits, so that a worker that is far behind fills no table."""
    shift = max(0, staleness.bit_length() - 6)
    return staleness >> shift << shift
