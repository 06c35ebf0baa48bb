"""Batches from one queue: all workers take from it, each as fast as it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from paceline.data.deadline import Accumulates, Deadline, accumulate, check_deadline
from paceline.data.fetching import fetched_ahead
from paceline.data.sampler import epoch_order
from paceline.hetero import split_evenly
from paceline.hetero.pool import cut, positions
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.ranges import Ranges
from paceline.wire import messages as m
from paceline.worker.session import Session


class PooledBatchSampler(Sampler[list[int]]):
    """Batches from one queue of an epoch's samples, for ``DataLoader(batch_sampler=...)`` without workers.

    For stores whose workers go on at their own speed: each takes its next batch when it has trained on the last one. So
    fast workers train on more samples, all samples count alike, and an epoch ends for all at the same time. Each sample
    is trained on once per epoch: what a worker held that leaves the job is given to the others. ::

        sampler = paceline.data.PooledBatchSampler(data, store, batch_size=32)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

    A batch counts as trained on when the loop asks for the next one, or has ended. A worker that finds only samples
    that others hold waits until they have trained on them; servers do not wait for it meanwhile.

    The order of the samples follows from (``seed``, ``epoch``); who gets which does not. There is no length: how many
    batches a worker gets depends on the others. An epoch cannot be continued in the middle.

    With ``deadline_s`` a worker stops to compute at that time since its step began, pushes what it has done, and gives
    the rest back to the pool, so that a slow batch delays nobody. The loop takes its parts from :meth:`parts_in_time`::

        for x, y in loader:
            optimizer.zero_grad()
            for x_part, y_part in sampler.parts_in_time(optimizer, x, y):
                loss_fn(model(x_part), y_part).backward()
            optimizer.step()

    Args:
        data: the data set or its length.
        store: a distributed store, but not ``dist_sync``, whose workers need equally many batches
            (:class:`SharedBatchSampler` gives these), and not ``dist_gsync`` with a bound.
        batch_size: of this worker; the last batches of an epoch may be smaller.
        shuffle: without it, samples keep their order and every epoch is the same.
        seed: 0 or more, the same on all workers.
        name: of the pool; samplers of the same name share it.
        max_batch: samples of a part, which fit into this worker's memory at once; by default the whole batch.
        deadline_s: seconds after which a worker begins no further part of a step; it needs ``max_batch``.

    Raises:
        ValueError: a store of another type, a batch size below 1, no data, a negative seed, or a deadline without
            ``max_batch``.
    """

    def __init__(
        self,
        data: int | Sized,
        store: KVStoreBase,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        name: str = "samples",
        max_batch: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._length = data if isinstance(data, int) else len(data)
        if batch_size < 1 or self._length < 1 or seed < 0:
            raise ValueError(f"{self._length} samples, batch_size {batch_size}, seed {seed}: 1, 1 and 0 are the least")
        if deadline_s is not None:
            check_deadline(deadline_s, max_batch)
        self._session = _session_of(store)
        self._max_batch = max_batch or batch_size
        self._deadline = None if deadline_s is None else Deadline(deadline_s, time.monotonic)
        self._held: Ranges = ()
        """Positions of the batch that was handed out last."""
        self._batch_size, self._shuffle, self._seed, self._name = batch_size, shuffle, seed, name
        self._number = 0
        self._epoch = -1

    @property
    def epoch(self) -> int:
        """The epoch that is under way; -1 before the first one."""
        return self._epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out batches until every sample of the next epoch is trained on by some worker.

        Raises:
            ValueError: a ``DataLoader`` fetches batches ahead.
        """
        if fetched_ahead():
            raise ValueError(
                "a DataLoader with num_workers > 0 takes batches from a pool before they are trained on, so those of a "
                "worker that dies would be lost. Give it num_workers=0, or take SharedBatchSampler, which knows what "
                "was fetched ahead"
            )
        self._epoch += 1
        order = epoch_order(self._length, self._seed, self._epoch) if self._shuffle else range(self._length)
        while True:
            self._number += 1  # all batches before are trained on, also the last one of a loop that was left
            request = m.TakeSamples(
                self._name, self._length, self._number, self._epoch, self._batch_size, self._number - 1,
                self._session.round,
            )  # fmt: skip
            samples = self._take(request)
            if samples.over:
                return
            self._held = tuple(samples.ranges)
            if self._deadline is not None:
                self._deadline.begin_step()
            yield [int(order[position]) for position in positions(self._held)]

    def parts_in_time(self, optimizer: Accumulates, *batch: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut a batch into parts of at most ``max_batch``; with ``deadline_s`` only as many as there is time for.

        After the last one the gradients are the mean over what was done, ``optimizer.samples`` is its size, and the
        rest is given back. A step must follow.

        Args:
            optimizer: a :class:`paceline.DistributedOptimizer` that does not overlap; its gradients are zero.
            batch: tensors with the samples of this worker's batch along their first dimension.
        """
        length = len(batch[0])
        sizes = split_evenly(length, [1.0] * -(-length // self._max_batch))
        done = yield from accumulate(optimizer, batch, sizes, self._deadline, contextlib.nullcontext)
        _, rest = cut(self._held, done)
        if rest:
            request = m.ReturnSamples(self._name, self._number, list(rest))
            self._session.call_scheduler(request, f"return of samples to pool {self._name!r}")

    def _take(self, request: m.TakeSamples) -> m.Samples:
        """Take samples. While it waits for those that others hold, no server waits for this worker's pushes."""
        what = f"samples of pool {self._name!r}"
        samples = self._session.call_scheduler(request, what)
        assert isinstance(samples, m.Samples)
        if samples.waits:
            self._session.stores.pause()
            samples = self._session.call_scheduler(m.AwaitSamples(self._name), what)
            assert isinstance(samples, m.Samples)
        return samples


def _session_of(store: KVStoreBase) -> Session:
    if not isinstance(store, DistStore):
        raise ValueError("a pool of samples needs a distributed store; a single process has nobody to share it with")
    policy = store.policy
    if policy.merge == "all" or (policy.merge == "groups" and policy.bound is not None):
        raise ValueError(
            f"a {store.type} store{' with a bound' if policy.bound is not None else ''} has no pool: its workers need "
            "equally many batches. SharedBatchSampler gives them, in proportion to their speed if wanted"
        )
    return store.session
