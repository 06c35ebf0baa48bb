"""Scale of the learning rate: the rate of an update, or of a sample."""

from __future__ import annotations

from collections.abc import Collection


class Samples:
    """The samples that each worker has pushed last.

    With ``lr_scale="sample"`` an update counts as its part of one batch of every live worker. So a sample moves the
    weights equally in every mode: an update of one of N workers steps by 1/N of the rate, of a group of n by n/N, of
    all by the rate itself. At one rate, all modes then make steps of the same sum per sample.
    """

    def __init__(self, num_workers: int) -> None:
        self.last = [0.0] * num_workers
        """0: nothing pushed yet; such a worker counts as the mean of the others."""

    def note(self, worker: int, samples: float) -> None:
        """Note a push."""
        self.last[worker] = samples

    def part(self, samples: float, live: Collection[int]) -> float:
        """Return the factor of an update of so many samples."""
        known = [self.last[worker] for worker in live if self.last[worker] > 0]
        return samples / (sum(known) / len(known) * len(live)) if known else 1.0
