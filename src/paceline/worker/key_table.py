"""The key table of one worker: for each key of a store its block and its place there, and plans of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.errors import KeyMismatchError
from paceline.keys import Key
from paceline.local_merge import LocalMerge
from paceline.tensors import dtype_name
from paceline.worker.block import WorkerBlock
from paceline.worker.host_memory import HostMemory
from paceline.worker.new_keys import NewKeys
from paceline.worker.plan import CallPlan, Place, make_plan
from paceline.worker.session import Session

#: Plans that are remembered at least, however few keys there are: one for each list of keys that was used last.
_MIN_PLANS = 256


class KeyTable:
    """The keys of one store on one worker.

    Args:
        session: this worker's connection to the job.
        store: name of the store.
        whole: returns whether keys must not be split.
        reads_in_place: stored values change only after this worker has pushed, so it may map the values of servers of
            this host.
        local_merge: servers that merge the pushes of each host.
    """

    def __init__(
        self, session: Session, store: str, whole: Callable[[], bool], reads_in_place: bool, local_merge: LocalMerge
    ) -> None:
        self._session, self._store = session, store
        self._new_keys = NewKeys(session, store, whole, reads_in_place, local_merge)
        self._host_memory = HostMemory(session, store)
        self.blocks: dict[int, WorkerBlock] = {}
        self._where: dict[Key, Place] = {}
        self._plans: dict[tuple[Key, ...], CallPlan] = {}

    @property
    def keys(self) -> list[Key]:
        """All keys, in the order in which they were initialised."""
        return list(self._where)

    def check_new(self, key: Key, tensor: torch.Tensor) -> None:
        """Raise if a key cannot be initialised.

        Raises:
            KeyMismatchError: it is initialised already.
            TypeError: a distributed store cannot hold the value.
        """
        if key in self._where:
            raise KeyMismatchError(f"key {key!r} is initialised already")
        if isinstance(key, int) and not -(2**63) <= key < 2**63:
            raise ValueError(f"key {key} does not fit into 64 bits; use a string")
        if tensor.layout is not torch.strided and not _has_sparse_rows(tensor):
            raise TypeError(f"the value of key {key!r} is sparse, but not only in its rows (one sparse dimension)")
        dtype_name(tensor.dtype)

    def locate(self, keys: Sequence[Key]) -> list[Place]:
        """Return the places of keys.

        Raises:
            KeyMismatchError: a key is not initialised.
        """
        for key in keys:
            if key not in self._where:
                raise KeyMismatchError(f"key {key!r} is not initialised in store {self._store!r}; call init first")
        return [self._where[key] for key in keys]

    def plan(self, keys: tuple[Key, ...]) -> CallPlan:
        """Return the plan of calls on these keys."""
        plan = self._plans.pop(keys, None)
        if plan is None:
            plan = make_plan(self.locate(keys))
        self._plans[keys] = plan  # the last one is the one that was used last
        if len(self._plans) > max(_MIN_PLANS, 2 * len(self._where)):
            del self._plans[next(iter(self._plans))]
        return plan

    def known_plan(self, keys: tuple[Key, ...]) -> CallPlan | None:
        """Return the plan of calls on these keys, or None if there was no such call before."""
        return self._plans.get(keys)

    # ---- adding keys -----------------------------------------------------------------------------------------------

    def add(
        self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int], answers: str = ""
    ) -> list[WorkerBlock]:
        """Initialise keys with rank 0's values, in one arena per dtype.

        Args:
            keys: new keys.
            values: initial values. They are row-sparse for keys whose pushes are rows; with ``answers`` they may be
                dense too.
            tags: keys of different tags never share a bucket.
            answers: content of the answers to pushes of rows, as in :class:`paceline.wire.messages.Init`.

        Raises:
            KeyMismatchError: shape or dtype differ from rank 0's.
        """
        if self._session.rank == 0:
            blocks = self._new_keys.publish(len(self.blocks), keys, values, tags, answers)
        else:
            blocks = self._new_keys.look_up(self.blocks, keys, values, answers)
        for block in blocks:
            self._adopt(block)
        return blocks

    def _adopt(self, block: WorkerBlock) -> None:
        """Register a block's keys, and share its arena with the servers of this host."""
        if block.spec.block in self.blocks:
            return
        self.blocks[block.spec.block] = block
        self._where |= {name: (block, index) for name, index in block.key_index.items()}
        self._host_memory.share(block)


def _has_sparse_rows(tensor: torch.Tensor) -> bool:
    return tensor.is_sparse and tensor.sparse_dim() == 1 and tensor.dim() > 1
