"""What a user may choose of shares."""

from __future__ import annotations

import os
from collections.abc import Sequence

from paceline.data.spans import read_spans
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore


def lock_step_of(store: KVStoreBase, measures: bool, deadline_s: float | None) -> DistStore | None:
    """Return the store whose workers agree on shares; None: there is one worker.

    Raises:
        ValueError: workers have to agree in every round, and the store is not in lock step.
    """
    if not isinstance(store, DistStore):
        return None
    if (measures or deadline_s is not None) and store.policy.merge != "all":
        what, instead = ("shares='measured'", "Give fractions") if measures else ("deadline_s", "Take a pool")
        raise ValueError(
            f"{what} needs dist_sync: the workers of a {store.type} store go on at their own speed, and "
            f"would have to wait for each other to agree. {instead} instead"
        )
    return store


def fractions_of(shares: str | os.PathLike[str] | Sequence[float], num_workers: int) -> list[float]:
    """Return the fraction of each worker with which a job begins.

    Raises:
        ValueError: there is not one per worker.
        ConfigError: the file cannot be used.
    """
    if isinstance(shares, str) and shares in ("equal", "measured"):
        return [1.0] * num_workers
    if isinstance(shares, str | os.PathLike):
        return [end - begin for begin, end in read_spans(shares, num_workers)]
    if len(shares) != num_workers:
        raise ValueError(f"shares {list(shares)} are not one per worker; the job has {num_workers}")
    return [float(one) for one in shares]
