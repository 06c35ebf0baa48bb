"""The store without servers: workers reduce among themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from paceline.collectives import process_sets, world
from paceline.collectives.errors import STORE
from paceline.collectives.operations import (
    Sum,
    allreduce,
    barrier,
    broadcast,
    sparse_allreduce_async,
    synchronize,
)
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.device_sums import sum_of
from paceline.layout.keys import Keys, Values, by_key
from paceline.wire.messages import StepBatch
from paceline.worker import alone


class AllReduceStore(KVStoreBase):
    """Sums the values of all devices and workers, by all-reduce. It holds no values and runs no optimizer.

    Keys pair the values of different workers, in any order. The job is the one that ``paceline.hvd`` joins, too.
    """

    def __init__(self, store_type: str) -> None:
        self._type = store_type
        process_sets.enter(STORE)
        alone.note_store("allreduce")

    @property
    def type(self) -> str:
        """The store's type, as given to ``create`` in lower case."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return world.current().rank

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return world.current().size

    @property
    def local_rank(self) -> int:
        """This worker's rank among those of its host."""
        return world.current().local_rank

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Copy worker 0's values into ``out``, on all workers."""
        values, outs = by_key(key, value), by_key(key, out)
        copies = {name: one[0].detach().clone(memory_format=torch.contiguous_format) for name, one in values.items()}
        handles = {name: broadcast([copy], 0, f"kvstore {name!r}", in_place=True) for name, copy in copies.items()}
        for name, handle in handles.items():
            synchronize(handle)
            _write(copies[name], outs[name])

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Sum the values of all devices and workers into ``out``, or into ``value`` itself.

        Raises:
            CollectiveError: workers disagree on a key's shape or dtype, or one ended.
        """
        values, outs = by_key(key, value), by_key(key, value if out is None else out)
        waiting = {name: _start_sum(f"kvstore {name!r}", devices) for name, devices in values.items()}
        for name, wait in waiting.items():
            _write(wait(), outs[name])

    def tell_step(
        self, name: str, step: int, weights: Mapping[str, torch.Tensor], batch: StepBatch | None = None
    ) -> None:
        """Let rank 0 compare this worker's weights and batch of a step with those of the others. Does not wait.

        Name of the optimizer and number of the step are the same on all workers.
        """
        world.current().tell_step(name, step, weights, batch=batch)

    def barrier(self) -> None:
        """Wait until all workers have called this."""
        barrier()


def _start_sum(name: str, values: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Start the sum of device values over all workers; returns a function that waits for it."""
    total = sum_of(values)
    if total.is_sparse:
        return sparse_allreduce_async(total, name, Sum)
    return partial(synchronize, allreduce([total], None, name, Sum, in_place=True))


def _write(result: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target in targets:
            if result.is_sparse and not target.is_sparse:
                target.copy_(result.to_dense())
            else:
                target.copy_(result)
