"""Batches from one queue: all workers take from it, each as fast as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from paceline.data.sampler import epoch_order
from paceline.hetero.pool import positions
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
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

    Args:
        data: the data set or its length.
        store: a distributed store, but not ``dist_sync``, whose workers need equally many batches
            (:class:`SharedBatchSampler` gives these), and not ``dist_gsync`` with a bound.
        batch_size: of this worker; the last batches of an epoch may be smaller.
        shuffle: without it, samples keep their order and every epoch is the same.
        seed: 0 or more, the same on all workers.
        name: of the pool; samplers of the same name share it.

    Raises:
        ValueError: a store of another type, a batch size below 1, no data, or a negative seed.
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
    ) -> None:
        self._length = data if isinstance(data, int) else len(data)
        if batch_size < 1 or self._length < 1 or seed < 0:
            raise ValueError(f"{self._length} samples, batch_size {batch_size}, seed {seed}: 1, 1 and 0 are the least")
        self._session = _session_of(store)
        self._batch_size, self._shuffle, self._seed, self._name = batch_size, shuffle, seed, name
        self._number = 0
        self._epoch = -1

    @property
    def epoch(self) -> int:
        """The epoch that is under way; -1 before the first one."""
        return self._epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out batches until every sample of the next epoch is trained on by some worker."""
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
            yield [int(order[position]) for position in positions(samples.ranges)]

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
