"""The keys of one worker's store: new ones are placed and shared; then each has a block and a place in it.

Rank 0 places new keys, and sends their values to the servers; the other workers look them up at the scheduler. Then a
worker shares the memory of the block with the servers of its host:

| step | request       | to                                           | result                                     |
|------|---------------|----------------------------------------------|--------------------------------------------|
| 1    | ``Relay``     | servers that sum this host's pushes          | they sum them; address of their values     |
| 2    | ``AskValues`` | owners, if the worker reads values in place  | address of their values; mapped here       |
| 3    | ``MapArena``  | both                                         | they read gradients, and may write values  |

Step 1 precedes this worker's first push. If memory cannot be shared (steps 2 and 3), values and gradients are sent
through sockets, and a warning is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from paceline.errors import DeadlineError, KeyMismatchError, ProtocolError, RemoteError
from paceline.hetero.groups import server_speeds
from paceline.layout.arguments import hint
from paceline.layout.keys import Key, check_kind
from paceline.layout.local_merge import LocalMerge
from paceline.layout.tensors import dtype_name, to_frame
from paceline.naming import listed
from paceline.wire import messages as m
from paceline.wire.limits import MAX_NAME
from paceline.worker.block import WorkerBlock, bucket_specs
from paceline.worker.call_plan import CallPlan, Place, make_plan
from paceline.worker.session import Session

logger = logging.getLogger(__name__)

#: Plans that are remembered at least, however few keys there are: one for each list of keys that was used last.
_MIN_PLANS = 256

#: Factor on the size of buckets if all processes are on one host: there a message costs more than its bytes. Over a
#: network smaller buckets let answers return while later buckets are still sent.
GROWTH = 4


class _Relayed(NamedTuple):
    """The buckets that a server of this host forwards to other owners, and the address of their values."""

    indices: list[int]
    found: m.ValuesAt


class KeyTable:
    """The keys of one store on one worker.

    ``reads_in_place``: stored values change only after this worker has pushed, so it may map the values of servers of
    this host.
    """

    def __init__(self, session: Session, store: str, reads_in_place: bool, local_merge: LocalMerge) -> None:
        self._session, self._store, self._reads_in_place = session, store, reads_in_place
        self._via = partial(local_merge.via, session.rank)
        self._num_servers = len(session.servers)
        self._loads = [0] * self._num_servers
        self.blocks: dict[int, WorkerBlock] = {}
        self._where: dict[Key, Place] = {}
        self._plans: dict[tuple[Key, ...], CallPlan] = {}
        self.mixes_kinds = False
        """An optimizer has its parameters here by name: a script's own keys may be int beside them."""

    @property
    def keys(self) -> list[Key]:
        """All keys, in the order in which they were initialised."""
        return list(self._where)

    def check_new(self, key: Key, tensor: torch.Tensor) -> None:
        """Raise if a key cannot be initialised.

        Raises:
            KeyMismatchError: it is initialised already.
            TypeError: a distributed store cannot hold the value, or the key is not of the kind of the others.
        """
        check_kind([key], () if self.mixes_kinds else self._where)
        if key in self._where:
            raise KeyMismatchError(f"key {key!r} is initialised already")
        if isinstance(key, int) and not -(2**63) <= key < 2**63:
            raise ValueError(f"key {key} does not fit into 64 bits; use a string")
        if isinstance(key, str):
            _check_name(key)
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
                raise KeyMismatchError(
                    f"key {key!r} is not initialised in store {self._store!r}: call init first{hint(key, self._where)}"
                )
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
        self,
        keys: Sequence[Key],
        values: Sequence[torch.Tensor],
        tags: Sequence[int],
        answers: str = "",
        *,
        whole: bool = False,
    ) -> list[WorkerBlock]:
        """Initialise keys with rank 0's values, in one arena per dtype.

        Args:
            keys: new keys.
            values: initial values. They are row-sparse for keys whose pushes are rows; with ``answers`` they may be
                dense too.
            tags: keys of different tags never share a bucket.
            answers: content of the answers to pushes of rows, as in :class:`paceline.wire.messages.Init`.
            whole: no key may be split.

        Raises:
            KeyMismatchError: shape or dtype differ from rank 0's.
        """
        if self._session.is_lead:
            blocks = self._place(keys, values, tags, answers, whole)
            self._send_values(blocks)
            specs, session = [block.spec for block in blocks], self._session
            publish = m.Publish(self._store, specs, not session.kind.lock_step, session.kind.auto)
            session.call_scheduler(publish, "publishing keys")
        else:
            blocks = self._look_up(keys, values, answers)
        for block in blocks:
            if block.spec.block not in self.blocks:
                self.blocks[block.spec.block] = block
                self._where |= {name: (block, index) for name, index in block.key_index.items()}
                self._share(block)
        return blocks

    # ---- new keys --------------------------------------------------------------------------------------------------

    def _place(
        self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int], answers: str, whole: bool
    ) -> list[WorkerBlock]:
        """Make the blocks of new keys, with their values. Rank 0 calls it."""
        first = len(self.blocks)
        kinds = [(dtype_name(value.dtype), value.is_sparse or bool(answers)) for value in values]
        found: dict[tuple[str, bool], list[m.KeySpec]] = {}
        for key, value, tag, kind in zip(keys, values, tags, kinds, strict=True):
            specs = found.setdefault(kind, [])
            # A row-sparse key has a unique tag, so it shares no bucket.
            specs.append(m.KeySpec(key, list(value.shape), len(specs) if kind[1] else tag))
        blocks: dict[tuple[str, bool], WorkerBlock] = {}
        for (dtype, by_rows), specs in found.items():
            block = self._make_block(
                self._block_spec(first + len(blocks), dtype, specs, by_rows, answers, by_rows or whole)
            )
            for bucket in block.layout.buckets:
                self._loads[bucket.server] += bucket.length
            blocks[dtype, by_rows] = block
        for key, value, kind in zip(keys, values, kinds, strict=True):
            block = blocks[kind]
            if answers != "merged":
                block.value_of(block.key_index[key]).copy_(value.detach().to_dense())
        return list(blocks.values())

    def _block_spec(
        self, number: int, dtype: str, specs: list[m.KeySpec], rows: bool, answers: str, whole: bool
    ) -> m.BlockSpec:
        settings = self._session.settings
        if settings.measures_servers:
            speeds = server_speeds([server.speed for server in self._session.servers])
        else:
            speeds = [float(part) for part in settings.server_speeds.split(",") if part]
        # Keys without stored values have no load: the servers get them in turn.
        loads = [0] * self._num_servers if answers == "merged" else list(self._loads)
        bound = settings.bigarray_bound
        largest = GROWTH * bound if self._session.is_on_one_host else bound
        return m.BlockSpec(
            number, dtype, specs, loads, speeds, bound, settings.placement, whole, rows, largest, answers
        )

    def _make_block(self, spec: m.BlockSpec) -> WorkerBlock:
        near = any(server.host_id == self._session.host_id for server in self._session.servers)
        if near and self._session.settings.shared_memory:
            try:
                return WorkerBlock(spec, self._num_servers, shared=True, still=self._reads_in_place, via=self._via)
            except OSError as error:
                logger.warning(
                    "worker %d: no shared memory for %d keys (%s); using sockets",
                    self._session.rank, len(spec.keys), error,
                )  # fmt: skip
        return WorkerBlock(spec, self._num_servers, shared=False, still=self._reads_in_place, via=self._via)

    def _send_values(self, blocks: Sequence[WorkerBlock]) -> None:
        calls = []
        for block in blocks:
            for server in range(self._num_servers):
                buckets = bucket_specs(block.spec, block.layout, server)
                spans = [m.Span(block.spec.block, one.index, 0, one.length) for one in buckets]
                frames = [to_frame(block.values[block.arena_slice(one)]) for one in spans]
                body = m.Init(self._store, block.spec.block, block.spec.dtype, buckets, block.spec.answers)
                calls.append(self._session.ask_server(server, body, "initialising keys", frames))
        self._session.wait(calls)

    def _look_up(self, keys: Sequence[Key], values: Sequence[torch.Tensor], answers: str) -> list[WorkerBlock]:
        """Return the blocks in which rank 0 has placed keys. The other workers call it.

        Raises:
            KeyMismatchError: shape, dtype or sparsity differ from rank 0's.
            DeadlineError: rank 0 did not initialise the keys in time.
        """
        if not keys:
            return []
        timeout_s = min(self._session.settings.start_timeout_s, self._session.settings.timeout_s)
        try:
            found = self._session.call_scheduler(m.Lookup(self._store, list(keys)), "asking for keys", timeout_s)
        except DeadlineError:
            raise self._never_initialised(keys, timeout_s) from None
        assert isinstance(found, m.Found)
        specs = {spec.name: (block.dtype, spec.shape) for block in found.blocks for spec in block.keys}
        kinds = {spec.name: block.answers for block in found.blocks for spec in block.keys}
        for key, value in zip(keys, values, strict=True):
            ours = (dtype_name(value.dtype), list(value.shape))
            if ours != specs[key]:
                raise KeyMismatchError(
                    f"key {key!r} has shape {tuple(value.shape)} and dtype {ours[0]} on worker {self._session.rank}, "
                    f"but shape {tuple(specs[key][1])} and dtype {specs[key][0]} on worker 0; the models differ"
                )
            if answers != kinds[key]:
                theirs, ours_is = ("sparse" if kind else "dense" for kind in (kinds[key], answers))
                raise KeyMismatchError(
                    f"the gradients of key {key!r} are {ours_is} on worker {self._session.rank}, but {theirs} on "
                    "worker 0; the models or the optimizers differ"
                )
        return [self.blocks.get(spec.block) or self._make_block(spec) for spec in found.blocks]

    def _never_initialised(self, keys: Sequence[Key], timeout_s: float) -> DeadlineError:
        """Return the error that names the keys that worker 0 has not initialised, and the keys that it has."""
        answer = self._session.call_scheduler(m.Lookup(self._store, []), "asking for the keys of worker 0", 5.0)
        assert isinstance(answer, m.Found)
        there = [spec.name for block in answer.blocks for spec in block.keys]
        missing = [key for key in keys if key not in there]
        others = [key for key in there if key not in keys and key not in self._where]
        return DeadlineError(
            f"worker {self._session.rank}: worker 0 did not initialise {_keys_text(missing)} of store {self._store!r} "
            f"within {timeout_s:g} s; " + (f"it has {_keys_text(others)} instead" if others else "it has no other keys")
            + ". Every worker must initialise the same keys; if worker 0 only needs more time, raise "
            "PACELINE_START_TIMEOUT_S"
        )  # fmt: skip

    # ---- memory of this host ---------------------------------------------------------------------------------------

    def _share(self, block: WorkerBlock) -> None:
        """Set up local merge of a block, and share its arena with the servers of this host."""
        relayed = self._ask_relays(block)
        if block.grad_file is None or block.spec.answers:  # rows are sent as frames
            return
        owners = {bucket.server for bucket in block.layout.buckets}
        for server in self._session.servers:
            if server.rank in owners | relayed.keys() and server.host_id == self._session.host_id:
                try:
                    self._share_with(server.rank, block, relayed.get(server.rank))
                    block.mapped.add(server.rank)
                except (RemoteError, ProtocolError, OSError, ValueError) as error:
                    logger.warning(
                        "worker %d: no shared memory with server %d (%s); using sockets",
                        self._session.rank, server.rank, error,
                    )  # fmt: skip

    def _ask_relays(self, block: WorkerBlock) -> dict[int, _Relayed]:
        """Ask servers of this host to forward pushes to other owners; returns their answers by rank.

        All workers whose pushes are summed there ask before they push.
        """
        indices: dict[int, list[int]] = {}
        for index, route in enumerate(block.routes):
            if route.via != route.owner:
                indices.setdefault(route.via, []).append(index)
        relayed = {}
        for server, mine in indices.items():
            buckets = [m.ForwardedBucket(i, block.layout.buckets[i].length, block.routes[i].owner) for i in mine]
            request = m.ForwardBuckets(self._store, block.spec.block, block.spec.dtype, buckets)
            found = self._session.call_server(server, request, "asking for local merge")
            assert isinstance(found, m.ValuesAt)
            relayed[server] = _Relayed(mine, found)
        return relayed

    def _share_with(self, server: int, block: WorkerBlock, relayed: _Relayed | None) -> None:
        """Map a server's values if that is possible, and let it read our gradients in place."""
        assert block.grad_file is not None
        if block.value_file is None:
            self._look_at(server, block, relayed)
        value_fd = -1 if block.value_file is None else block.value_file.fd
        size = block.layout.numel * block.dtype.itemsize
        starts = [bucket.start for bucket in block.layout.buckets]
        body = m.MapArena(
            self._store, block.spec.block, os.getpid(), value_fd, block.grad_file.fd, size, starts
        )  # fmt: skip
        self._session.call_server(server, body, "offering shared memory")

    def _look_at(self, server: int, block: WorkerBlock, relayed: _Relayed | None) -> None:
        """Map a server's values of its own buckets, and of those that it forwards, in place of our copy."""
        own = [index for index, bucket in enumerate(block.layout.buckets) if bucket.server == server]
        if own:
            question = m.AskValues(self._store, block.spec.block)
            found = self._session.call_server(server, question, "asking for shared memory")
            assert isinstance(found, m.ValuesAt)
            block.look_at(own, found)
        if relayed is not None:
            block.look_at(*relayed)


def _check_name(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key[:40]!r} cannot be sent: {error}") from None
    if len(key) > MAX_NAME:
        raise ValueError(
            f"key {key[:40]!r}... has {len(key)} characters; those of a distributed store have up to {MAX_NAME}"
        )


def _has_sparse_rows(tensor: torch.Tensor) -> bool:
    return tensor.is_sparse and tensor.sparse_dim() == 1 and tensor.dim() > 1


def _keys_text(keys: Sequence[Key]) -> str:
    return f"key{'s' if len(keys) > 1 else ''} {listed(map(repr, keys), 5)}"
