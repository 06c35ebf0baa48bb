"""What every store reports, so that comparisons between modes are honest."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters over the updates of a store."""

    updates: int = 0
    skipped: int = 0
    """Updates that a worker asked not to make: counted, but without effect."""
    inverse_sum: float = 0.0
    """Sum of 1/staleness."""
    weight_sum: float = 0.0
    """Sum of the weights of all updates; times the learning rate it is the step mass."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many updates had which staleness."""
    data_mass: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Samples per worker that reached the model, each times its update's weight."""
    dropped: Counter[int] = field(default_factory=Counter)
    """Pushes per worker that were too old to count; their total is ``dropped.total()``."""

    def seen(self, staleness: int) -> tuple[int, float]:
        """Count an update and return (updates, sum of 1/staleness) so far."""
        self.updates += 1
        self.inverse_sum += 1.0 / staleness
        self.staleness[staleness] += 1
        return self.updates, self.inverse_sum
