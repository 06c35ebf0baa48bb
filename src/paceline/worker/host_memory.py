"""Shares memory between a worker and the servers of its host, per block.

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
from collections.abc import Mapping
from typing import NamedTuple

from paceline.errors import ProtocolError, RemoteError
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock
from paceline.worker.session import Session

logger = logging.getLogger(__name__)


class _Relayed(NamedTuple):
    """The buckets that a server of this host forwards to other owners, and the address of their values."""

    indices: list[int]
    found: m.ValuesAt


class HostMemory:
    """Shares the arenas of a store with the servers of this host.

    Args:
        session: this worker's connection to the job.
        store: name of the store.
    """

    def __init__(self, session: Session, store: str) -> None:
        self._session, self._store = session, store

    def share(self, block: WorkerBlock) -> None:
        """Set up local merge of a block, and share its arena."""
        relayed = self._ask_relays(block)
        if block.grad_file is not None and not block.spec.answers:  # rows are sent as frames
            self._share(block, relayed)

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

    def _share(self, block: WorkerBlock, relayed: Mapping[int, _Relayed]) -> None:
        """Share memory with the servers of this host."""
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

    def _share_with(self, server: int, block: WorkerBlock, relayed: _Relayed | None) -> None:
        """Map a server's values if that is possible, and let it read our gradients in place."""
        assert block.grad_file is not None
        if block.value_file is None:
            self._look_at(server, block, relayed)
        value_fd = -1 if block.value_file is None else block.value_file.fd
        size = block.layout.numel * block.dtype.itemsize
        starts = [bucket.start for bucket in block.layout.buckets]
        pid, grad_fd = self._session.pid, block.grad_file.fd
        body = m.MapArena(self._store, block.spec.block, pid, value_fd, grad_fd, size, starts)
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
