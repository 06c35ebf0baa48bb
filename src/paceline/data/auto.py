"""The batch sampler that suits a store: batches by speed in lock step, a pool elsewhere, two sizes while measuring."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeAlias

from torch.utils.data import Sampler

from paceline.data.fetching import Dealing
from paceline.data.ledger import State, epoch_order
from paceline.data.partition import length_of
from paceline.data.pool import PooledBatchSampler
from paceline.data.shares import SharedBatchSampler
from paceline.hetero.measured import sizes
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.kvstore.dist.store_policy import chosen
from paceline.worker.round_times import WARM_UP

_log = logging.getLogger(__name__)

#: Types that :func:`batch_sampler` returns: all of them have ``set_epoch``, ``state_dict`` and ``load_state_dict``.
BatchSampler: TypeAlias = "SharedBatchSampler | PooledBatchSampler | TwoSizes"


def batch_sampler(
    data: int | Sized, store: KVStoreBase, *, batch_size: int, shuffle: bool = True, seed: int = 0
) -> BatchSampler:
    """Return a sampler for ``DataLoader(batch_sampler=...)`` that gives unequal workers unequal parts, in any mode. ::

        store = paceline.kvstore.create("dist_auto")
        sampler = paceline.data.batch_sampler(data, store, batch_size=32)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

    With ``dist_auto`` it is the one chosen together with the mode. Otherwise workers in lock step get batches by
    measured speed (:class:`SharedBatchSampler`), others take from a pool (:class:`PooledBatchSampler`). A state of one
    can be loaded by the other, so a job can resume with the one chosen then.

    Args:
        data: the data set or its length.
        store: the job's store.
        batch_size: batch size of each worker; with batches by speed, the mean over workers.
        shuffle: without it, samples keep their order and every epoch is the same.
        seed: 0 or more, the same on all workers.

    Raises:
        ValueError: there are fewer samples than workers, or a number is too small.
    """
    total = batch_size * store.num_workers
    if not isinstance(store, DistStore):
        return SharedBatchSampler(data, store, global_batch_size=total, shuffle=shuffle, seed=seed)
    store.session.trains(hands_out=True)
    shares = _shares_of(store)
    if shares == "sizes":
        return TwoSizes(data, batch_size, seed, store.session.settings.profile_rounds)
    if shares == "pool":
        return PooledBatchSampler(data, store, batch_size=batch_size, shuffle=shuffle, seed=seed)
    if shares == "measured" and store.rank == 0 and not _is_auto(store):
        _log.warning(
            "worker 0: paceline.data.batch_sampler deals each %d samples by measured speed, as %s has all workers in "
            "lock step: batches of unequal workers will differ from %d. Equal ones come from ShardedSampler, or "
            'SharedBatchSampler(..., shares="equal")', total, store.type, batch_size,
        )  # fmt: skip
    return SharedBatchSampler(data, store, global_batch_size=total, shares=shares, shuffle=shuffle, seed=seed)


def _shares_of(store: DistStore) -> str:
    """Return ``sizes`` in a job that only measures, else ``equal``, ``measured`` or ``pool``."""
    if store.session.settings.profile:
        return "sizes"
    if _is_auto(store):
        choice = chosen(store.session.settings)
        assert choice is not None
        return choice.shares
    if store.policy.merge == "all":
        return "measured"
    return "equal" if store.policy.merge == "groups" and store.policy.bound is not None else "pool"


def _is_auto(store: DistStore) -> bool:
    return store.type.startswith("dist_auto") or store.type == "dist_device_auto"


class TwoSizes(Sampler[list[int]]):
    """Batches of a job that measures its workers and then ends: first whole ones, then smaller ones."""

    def __init__(self, data: int | Sized, batch_size: int, seed: int, rounds: int) -> None:
        self._length = length_of(data)
        if batch_size < 1 or self._length < 1 or seed < 0:
            raise ValueError(f"{self._length} samples, batch_size {batch_size}, seed {seed}: 1, 1 and 0 are the least")
        self._order = epoch_order(self._length, seed, 0)
        self._state: State = {
            "epoch": 0, "left": [[0, self._length]], "length": self._length, "seed": seed, "shuffle": True,
        }  # fmt: skip
        self._sizes = [batch_size] * WARM_UP + sizes(batch_size, rounds) + [batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out batches without an end: the job ends when enough rounds are measured."""
        begin, number = 0, 0
        with Dealing(self) as dealing:
            while True:
                size = self._sizes[min(number, len(self._sizes) - 1)]
                dealing.deal(size)
                yield [int(self._order[(begin + one) % self._length]) for one in range(size)]
                begin, number = begin + size, number + 1

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: there is no epoch."""

    def state_dict(self) -> State:
        """Return the state that was loaded: a measurement is no training."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state, to return it."""
        self._state = dict(state)
