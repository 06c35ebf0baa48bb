"""The store without servers: workers reduce among themselves by the Horovod interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import paceline.hvd as hvd
from paceline.hvd import world
from paceline.hvd.collectives import allreduce_async_, broadcast_async_, sparse_allreduce_async, synchronize
from paceline.keys import Keys, Values, normalise
from paceline.kvstore.base import KVStoreBase


class AllReduceStore(KVStoreBase):
    """Sums the values of all devices and workers, by all-reduce. It holds no values and runs no optimizer.

    Keys pair the values of different workers, in any order. The job is that of ``paceline.hvd``, which this joins.

    Args:
        store_type: the name that it was created under.
    """

    def __init__(self, store_type: str) -> None:
        self._type = store_type
        hvd.init()

    @property
    def type(self) -> str:
        """The store's type, as given to ``create`` in lower case."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return hvd.rank()

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return hvd.size()

    @property
    def local_rank(self) -> int:
        """This worker's rank among those of its host."""
        return hvd.local_rank()

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Copy worker 0's values into ``out``, on all workers."""
        keys, values = normalise(key, value)
        _, outs = normalise(key, out)
        copies = [one[0].detach().clone(memory_format=torch.contiguous_format) for one in values]
        handles = [broadcast_async_(copy, 0, f"kvstore {name!r}") for name, copy in zip(keys, copies, strict=True)]
        for handle, copy, targets in zip(handles, copies, outs, strict=True):
            synchronize(handle)
            _write(copy, targets)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Sum the values of all devices and workers into ``out``, or into ``value`` itself.

        Raises:
            HorovodInternalError: workers disagree on a key's shape or dtype, or one ended.
        """
        keys, values = normalise(key, value)
        _, outs = normalise(key, value if out is None else out)
        waiting = []
        for name, one in zip(keys, values, strict=True):
            total = _sum(one)
            text = f"kvstore {name!r}"
            if total.is_sparse:
                waiting.append(sparse_allreduce_async(total, text, hvd.Sum))
                continue
            handle = allreduce_async_(total, None, text, hvd.Sum)
            waiting.append(lambda handle=handle: synchronize(handle))  # type: ignore[misc]
        for wait, targets in zip(waiting, outs, strict=True):
            _write(wait(), targets)

    def compare_weights(self, name: str, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Let rank 0 compare this worker's weights after a step with those of the others. Does not wait.

        Args:
            name: name of the optimizer, the same on all workers.
            step: number of the step, which is the same on all workers.
            weights: tensors by name.
        """
        world.current().compare_weights(name, step, weights)

    def barrier(self) -> None:
        """Wait until all workers have called this."""
        hvd.barrier()


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new tensor with the sum of device values, on the first device."""
    first = values[0].detach()
    total = first.clone() if first.is_sparse else first.clone(memory_format=torch.contiguous_format)
    for one in values[1:]:
        total = total + one.detach().to(total.device)
    return total


def _write(result: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target in targets:
            if result.is_sparse and not target.is_sparse:
                target.copy_(result.to_dense())
            else:
                target.copy_(result)
