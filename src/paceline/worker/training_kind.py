"""How a worker trains, as far as its session tells others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingKind:
    """What stores, samplers and optimizers of a worker have said about its training.

    Attributes:
        grouped_store: the store whose workers may change their groups; a job has one at a time.
        auto: ``free`` if a store of this worker is ``dist_auto`` and can change groups, ``fixed`` if it cannot.
        group: number of this worker's group, from 1, where workers step in groups; 0: all workers step together.
        lock_step: whether a store of this worker has all workers in lock step.
        is_ddp: whether the rounds of this worker are those of a DDP script.
        has_measured_shares: whether samples of this job go to workers by measured speed.
        is_local: whether the rounds of this worker are periods of local steps.
        store_type: type of the store that this worker has made last, such as ``dist_sync``.
        hands_out: whether samples of this job go to the worker that is free, so that unequal workers can train on
            different parts.
    """

    grouped_store: str = ""
    auto: str = ""
    group: int = 0
    lock_step: bool = False
    is_ddp: bool = False
    has_measured_shares: bool = False
    is_local: bool = False
    store_type: str = ""
    hands_out: bool = False
