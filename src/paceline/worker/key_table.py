"""Where the keys of a store are: rank 0 places them, the other workers learn it from the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from paceline.errors import DeadlineError, KeyMismatchError, ProtocolError, RemoteError
from paceline.keys import Key
from paceline.local_merge import LocalMerge
from paceline.tensors import dtype_name, to_frame
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock, bucket_specs
from paceline.worker.plan import Place, Plan, make_plan
from paceline.worker.session import Session

logger = logging.getLogger(__name__)

#: How much larger than the bound buckets become where all is on one host. There messages cost more than the way; over a
#: network nothing moves in the other direction before the first bucket has arrived.
GROWTH = 4


class _Forwarded(NamedTuple):
    """The buckets that a server of this host takes for others, and where it keeps their values."""

    indices: list[int]
    found: m.ValuesAt


class KeyTable:
    """The keys of one store, as one worker knows them.

    Args:
        session: this worker's part in the job.
        store: name of the store.
        whole: tells whether keys must not be split.
        still: values change only after this worker has pushed.
        local_merge: where local merge takes place.
    """

    def __init__(
        self, session: Session, store: str, whole: Callable[[], bool], still: bool, local_merge: LocalMerge
    ) -> None:
        self._session, self._store, self._whole, self._still = session, store, whole, still
        self._via = partial(local_merge.via, session.rank)
        self._num_servers = len(session.servers)
        self.blocks: dict[int, WorkerBlock] = {}
        self._where: dict[Key, Place] = {}
        self._plans: dict[tuple[Key, ...], Plan] = {}
        self._loads = [0] * self._num_servers

    @property
    def keys(self) -> list[Key]:
        """All keys, in the order in which they were initialised."""
        return list(self._where)

    def check_new(self, key: Key, tensor: torch.Tensor) -> None:
        """Refuse a key that cannot be initialised.

        Raises:
            KeyMismatchError: it is initialised already.
            TypeError: a value that a distributed store does not hold.
        """
        if key in self._where:
            raise KeyMismatchError(f"key {key!r} is initialised already")
        if isinstance(key, int) and not -(2**63) <= key < 2**63:
            raise ValueError(f"key {key} does not fit into 64 bits; use a string")
        if tensor.layout is not torch.strided and not _has_sparse_rows(tensor):
            raise TypeError(f"the value of key {key!r} is sparse, but not in its rows alone (one sparse dimension)")
        dtype_name(tensor.dtype)

    def locate(self, keys: Sequence[Key]) -> list[Place]:
        """Return where keys are.

        Raises:
            KeyMismatchError: a key is not initialised.
        """
        for key in keys:
            if key not in self._where:
                raise KeyMismatchError(f"key {key!r} is not initialised in store {self._store!r}; call init first")
        return [self._where[key] for key in keys]

    def plan(self, keys: tuple[Key, ...]) -> Plan:
        """Return the plan of calls on these keys."""
        plan = self._plans.get(keys)
        if plan is None:
            plan = self._plans[keys] = make_plan(self.locate(keys))
        return plan

    def known_plan(self, keys: tuple[Key, ...]) -> Plan | None:
        """Return the plan of calls on these keys if there was such a call before."""
        return self._plans.get(keys)

    # ---- adding keys -----------------------------------------------------------------------------------------------

    def add(
        self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int], answers: str = ""
    ) -> list[WorkerBlock]:
        """Initialise keys with rank 0's values, in one arena per dtype.

        Args:
            keys: to add.
            values: sparse, in their rows alone, where pushes are rows; also dense with ``answers``.
            tags: keys of different tags never share a bucket.
            answers: what pushes of rows bring back, as in :class:`paceline.wire.messages.Init`.

        Raises:
            KeyMismatchError: shape or dtype differ from rank 0's.
        """
        if self._session.rank == 0:
            blocks = self._place(keys, values, tags, answers)
            self._send_values(blocks)
            publish = m.Publish(self._store, [block.spec for block in blocks])
            self._session.call_scheduler(publish, "publishing keys")
        else:
            blocks = self._look_up(keys, values, answers)
        for block in blocks:
            self._adopt(block)
        return blocks

    def _place(
        self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int], answers: str
    ) -> list[WorkerBlock]:
        kinds = [(dtype_name(value.dtype), value.is_sparse or bool(answers)) for value in values]
        found: dict[tuple[str, bool], list[m.KeySpec]] = {}
        for key, value, tag, kind in zip(keys, values, tags, kinds, strict=True):
            specs = found.setdefault(kind, [])
            # A tag of its own gives a row-sparse key a bucket for itself.
            specs.append(m.KeySpec(key, list(value.shape), len(specs) if kind[1] else tag))
        blocks: dict[tuple[str, bool], WorkerBlock] = {}
        for (dtype, by_rows), specs in found.items():
            block = self._make_block(self._block_spec(len(self.blocks) + len(blocks), dtype, specs, by_rows, answers))
            for bucket in block.layout.buckets:
                self._loads[bucket.server] += bucket.length
            blocks[dtype, by_rows] = block
        for key, value, kind in zip(keys, values, kinds, strict=True):
            block = blocks[kind]
            if answers != "merged":
                block.value_of(block.key_index[key]).copy_(value.detach().to_dense())
        return list(blocks.values())

    def _block_spec(self, number: int, dtype: str, specs: list[m.KeySpec], rows: bool, answers: str) -> m.BlockSpec:
        settings = self._session.settings
        speeds = [float(part) for part in settings.server_speeds.split(",") if part]
        # Keys of which nothing is stored weigh nothing: they go round the servers.
        loads = [0] * self._num_servers if answers == "merged" else list(self._loads)
        bound, whole = settings.bigarray_bound, rows or self._whole()
        largest = GROWTH * bound if self._session.is_on_one_host else bound
        return m.BlockSpec(
            number, dtype, specs, loads, speeds, bound, settings.placement, whole, rows, largest, answers
        )

    def _make_block(self, spec: m.BlockSpec) -> WorkerBlock:
        near = any(server.host_id == self._session.host_id for server in self._session.servers)
        if near and self._session.settings.shared_memory:
            try:
                return WorkerBlock(spec, self._num_servers, shared=True, still=self._still, via=self._via)
            except OSError as error:
                logger.warning(
                    "worker %d: no shared memory for %d keys (%s); using sockets",
                    self._session.rank, len(spec.keys), error,
                )  # fmt: skip
        return WorkerBlock(spec, self._num_servers, shared=False, still=self._still, via=self._via)

    def _send_values(self, blocks: Sequence[WorkerBlock]) -> None:
        tickets = []
        for block in blocks:
            for server in range(self._num_servers):
                buckets = bucket_specs(block.spec, block.layout, server)
                frames = [to_frame(block.values[block.arena_slice(one.index, 0, one.length)]) for one in buckets]
                body = m.Init(self._store, block.spec.block, block.spec.dtype, buckets, block.spec.answers)
                tickets.append(self._session.ask_server(server, body, "initialising keys", frames))
        self._session.wait(tickets)

    def _look_up(self, keys: Sequence[Key], values: Sequence[torch.Tensor], answers: str) -> list[WorkerBlock]:
        """Learn from the scheduler where rank 0 has put the keys, and compare them with ours."""
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
        """Say which keys worker 0 has not initialised, and what it has instead."""
        answer = self._session.call_scheduler(m.Lookup(self._store, []), "asking for the keys of worker 0", 5.0)
        assert isinstance(answer, m.Found)
        there = [spec.name for block in answer.blocks for spec in block.keys]
        missing = [key for key in keys if key not in there]
        others = [key for key in there if key not in keys and key not in self._where]
        return DeadlineError(
            f"worker {self._session.rank}: worker 0 did not initialise {_listed(missing)} of store {self._store!r} "
            f"within {timeout_s:g} s; " + (f"it has {_listed(others)} instead" if others else "it has no other keys")
            + ". Every worker must initialise the same keys; if worker 0 only takes longer to come there, raise "
            "PACELINE_START_TIMEOUT_S"
        )  # fmt: skip

    def _adopt(self, block: WorkerBlock) -> None:
        """Make a block's keys known, and offer its arena to the servers of this host."""
        if block.spec.block in self.blocks:
            return
        self.blocks[block.spec.block] = block
        self._where |= {name: (block, index) for name, index in block.key_index.items()}
        forwarded = self._ask_forwarding(block)
        if block.grad_file is not None and not block.spec.answers:  # rows travel as frames
            self._share(block, forwarded)

    def _ask_forwarding(self, block: WorkerBlock) -> dict[int, _Forwarded]:
        """Ask servers of this host to pass on what is pushed for others; returns what each said, by its rank.

        All workers that are summed there ask before they push.
        """
        indices: dict[int, list[int]] = {}
        for index, route in enumerate(block.routes):
            if route.via != route.owner:
                indices.setdefault(route.via, []).append(index)
        forwarded = {}
        for server, mine in indices.items():
            buckets = [m.ForwardedBucket(i, block.layout.buckets[i].length, block.routes[i].owner) for i in mine]
            request = m.ForwardBuckets(self._store, block.spec.block, block.spec.dtype, buckets)
            found = self._session.call_server(server, request, "asking for local merge")
            assert isinstance(found, m.ValuesAt)
            forwarded[server] = _Forwarded(mine, found)
        return forwarded

    def _share(self, block: WorkerBlock, forwarded: Mapping[int, _Forwarded]) -> None:
        """Share memory with the servers of this host."""
        owners = {bucket.server for bucket in block.layout.buckets}
        for server in self._session.servers:
            if server.rank in owners | forwarded.keys() and server.host_id == self._session.host_id:
                try:
                    self._share_with(server.rank, block, forwarded.get(server.rank))
                    block.mapped.add(server.rank)
                except (RemoteError, ProtocolError, OSError, ValueError) as error:
                    logger.warning(
                        "worker %d: no shared memory with server %d (%s); using sockets",
                        self._session.rank, server.rank, error,
                    )  # fmt: skip

    def _share_with(self, server: int, block: WorkerBlock, forwarded: _Forwarded | None) -> None:
        """Look at a server's values in place where that is possible, and let it read our gradients in place."""
        assert block.grad_file is not None
        if block.value_file is None:
            self._look_at(server, block, forwarded)
        value_fd = -1 if block.value_file is None else block.value_file.fd
        size = block.layout.numel * block.dtype.itemsize
        starts = [bucket.start for bucket in block.layout.buckets]
        pid, grad_fd = self._session.pid, block.grad_file.fd
        body = m.MapArena(self._store, block.spec.block, pid, value_fd, grad_fd, size, starts)
        self._session.call_server(server, body, "offering shared memory")

    def _look_at(self, server: int, block: WorkerBlock, forwarded: _Forwarded | None) -> None:
        """Put a server's values of its own buckets, and of those that it forwards, in the place of ours."""
        own = [index for index, bucket in enumerate(block.layout.buckets) if bucket.server == server]
        if own:
            question = m.AskValues(self._store, block.spec.block)
            found = self._session.call_server(server, question, "asking for shared memory")
            assert isinstance(found, m.ValuesAt)
            block.look_at(own, found)
        if forwarded is not None:
            block.look_at(*forwarded)


def _listed(keys: Sequence[Key]) -> str:
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return f"key{'s' if len(keys) > 1 else ''} {', '.join(map(repr, keys[:5]))}{more}"


def _has_sparse_rows(tensor: torch.Tensor) -> bool:
    return tensor.is_sparse and tensor.sparse_dim() == 1 and tensor.dim() > 1
