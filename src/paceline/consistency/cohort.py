"""A cohort: the pushes that make one update."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Cohort:
    """Pushes that wait until they are enough for one update."""

    number: int
    unit: int
    """The unit that fills it; -1 where any worker may."""
    phase: int
    """Phase of the unit's workers that fill it."""
    oldest: int
    """Oldest version that its contributors had read when they pushed."""
    workers: list[int] = field(default_factory=list)
    """Contributors, in the order of arrival."""
    samples: dict[int, float] = field(default_factory=dict)
    """Per contributor."""

    def join(self, worker: int, samples: float, read: int) -> None:
        """Count a push.

        Args:
            worker: the worker that pushed.
            samples: number of samples behind the push.
            read: version that the worker had read.
        """
        self.workers.append(worker)
        self.samples[worker] = self.samples.get(worker, 0.0) + samples
        self.oldest = min(self.oldest, read)
