"""Local merge: which server of a host sums pushes of its workers for servers on other hosts. Pure.

Workers of one host that step together would each send their gradient over the network and each get the answer. A server
of their own host sums the gradients first and forwards one sum to the owner (the local server of BytePS, Jiang et al.
2020). It then gets one answer for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Route(NamedTuple):
    """How pushes of a bucket travel."""

    owner: int
    """The server that keeps the bucket."""
    via: int
    """The server to which workers push: the owner, or one of their own host that forwards their sum."""


@dataclass(frozen=True)
class LocalMerge:
    """Where local merge takes place. Every process works it out from the same members, so no process has to ask.

    Args:
        workers: host of every worker, by rank.
        servers: host of every server, by rank.
        units: per worker, the unit that steps together. A worker that is alone in its unit pushes directly.
    """

    workers: Sequence[str]
    servers: Sequence[str]
    units: Sequence[int]

    def local_unit(self, worker: int) -> tuple[int, ...]:
        """Return the workers of a worker's unit on its host, in the order of ranks, the worker itself included."""
        place = (self.units[worker], self.workers[worker])
        return tuple(rank for rank, one in enumerate(zip(self.units, self.workers, strict=True)) if one == place)

    def via(self, worker: int, owner: int) -> int:
        """Return the server where a worker pushes buckets of ``owner``; owners are spread over its host's servers."""
        near = [rank for rank, host in enumerate(self.servers) if host == self.workers[worker]]
        if not near or owner in near or len(self.local_unit(worker)) < 2:
            return owner
        return near[owner % len(near)]

    def forwarded_by(self, server: int, worker: int) -> list[int]:
        """Return the owners to which a server forwards a worker's pushes."""
        return [owner for owner in range(len(self.servers)) if self.via(worker, owner) == server != owner]
