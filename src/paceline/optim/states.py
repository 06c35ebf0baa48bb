"""The state with which an optimizer begins: all workers have rank 0's, as they have its weights.

Some optimizers keep the weights of their start (Lookahead), which a worker has made before it has rank 0's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from paceline.errors import ConfigError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.layout.tensors import real_view
from paceline.optim.names import NamedParameter
from paceline.optim.shared_tensors import Copies, broadcast


def share_states(store: KVStoreBase, optimizer: torch.optim.Optimizer, named: Sequence[NamedParameter]) -> None:
    """Set the tensors in an optimizer's state to rank 0's. Every worker calls it.

    The workers of a distributed store have compared their kinds
    (:func:`~paceline.kvstore.start_checks.state_facts`).

    Raises:
        ConfigError: the workers of another store do not have the same tensors.
    """
    tensors = {
        f"state {entry!r} of {name}": [real_view(one.data)]
        for name, param, _ in named
        for entry, one in optimizer.state.get(param, {}).items()
        if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.numel()
    }
    if store.num_workers == 1 or (isinstance(store, DistStore) and store.session.joining.is_on):
        return
    if not isinstance(store, DistStore):
        _check_alike(store, tensors)
        broadcast(store, tensors)
    elif tensors:
        own = store.sibling("state")
        broadcast(own, tensors)
        own.barrier()
        own.close()


def _check_alike(store: KVStoreBase, tensors: Copies) -> None:
    kinds = [f"{name} {tuple(one.shape)} {one.dtype}" for name, [one] in tensors.items()]
    marks = torch.zeros(store.num_workers, dtype=torch.float64, device="cpu")
    marks[store.rank] = 1 + zlib.crc32("\n".join(kinds).encode())
    store.pushpull(f"states of {store.num_workers}", marks, marks)
    if len(set(marks.tolist())) > 1:
        raise ConfigError(
            f"worker {store.rank}: the workers' optimizers do not begin with the same state (here it has {len(kinds)} "
            "tensors): before DistributedOptimizer is made, load the same state on every worker, or on none"
        )
