"""Local merge: which server of a host sums what workers there push for servers on other hosts. Pure.

Workers of one host that step together would send as many gradients over the network, and get as many answers, as they
are. Summed by a server of their own host first, one of each is enough (the local server of BytePS, Jiang et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Way(NamedTuple):
    """How pushes of a bucket travel."""

    owner: int
    """The server that keeps the bucket."""
    via: int
    """The server to which workers push: the owner, or one of their own host that passes their sum on."""


@dataclass(frozen=True)
class LocalMerge:
    """Where local merge takes place. Everybody works it out from the same members, so nobody has to ask.

    Args:
        workers: host of every worker, by rank.
        servers: host of every server, by rank.
        units: per worker, the unit that steps together; whoever is alone in one pushes by himself.
    """

    workers: Sequence[str]
    servers: Sequence[str]
    units: Sequence[int]

    def mates(self, worker: int) -> tuple[int, ...]:
        """Return the workers of one unit and host, in the order of ranks, this one included."""
        place = (self.units[worker], self.workers[worker])
        return tuple(rank for rank, one in enumerate(zip(self.units, self.workers, strict=True)) if one == place)

    def via(self, worker: int, owner: int) -> int:
        """Return the server to which a worker pushes buckets of ``owner``; owners are spread over those of its host."""
        near = [rank for rank, host in enumerate(self.servers) if host == self.workers[worker]]
        if not near or owner in near or len(self.mates(worker)) < 2:
            return owner
        return near[owner % len(near)]

    def relayed_by(self, server: int, worker: int) -> list[int]:
        """Return the owners for whose buckets a worker pushes to this other server."""
        return [owner for owner in range(len(self.servers)) if self.via(worker, owner) == server != owner]
