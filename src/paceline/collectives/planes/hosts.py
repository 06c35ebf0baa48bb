"""The plane of a process group: shared memory inside each host, the job's servers between hosts.

| operation | ranks of one host | ranks of several hosts |
|---|---|---|
| allreduce | shared memory | reduced on each host, then among the first ranks of the hosts, then copied on each host |
| broadcast | shared memory | to the root's host, then to the first ranks of the hosts, then on each host |
| others | shared memory | all ranks meet at the servers |

Without shared memory (``PACELINE_SHARED_MEMORY=0``, or processes that may not map each other's memory) every rank is a
host of its own.

Deadlines: a rank waits longer for another host than for its own, and longest for what its own host gets from others. So
the rank that fails first is the one that waits for the missing one itself, and its error names that one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collectives.planes.base import Alone, Plane, Reduction, allreduce_by_levels
from paceline.collectives.planes.servers import FarPlane
from paceline.collectives.planes.shared import SharedPlane, share_memory
from paceline.worker.session import Session

#: Seconds by which each level waits longer than the one below it.
_LATER_S = 2.0


class HostsPlane:
    """The plane of a group's ranks. Made by all of them."""

    def __init__(self, session: Session, group: str, members: Sequence[int], timeout_s: float) -> None:
        self.index, self.size = list(members).index(session.rank), len(members)
        self._members = list(members)
        self._all = FarPlane(session, group, members, timeout_s)
        hosts = [session.workers[rank].host_id for rank in members]
        near = [rank for rank, host in zip(members, hosts, strict=True) if host == hosts[self.index]]
        self._neighbours, shares = share_memory(
            session.rank, near, session.settings.shared_memory, timeout_s,
            lambda mine: dict(zip(members, self._all.swap_bytes(mine), strict=True)), session.check,
        )  # fmt: skip
        if not shares:
            hosts, near = [str(rank) for rank in members], [session.rank]
        self._hosts, self._near_members = hosts, near
        self._near: Plane = Alone() if self._neighbours is None else SharedPlane(self._neighbours, near, False)
        firsts = [members[hosts.index(host)] for host in dict.fromkeys(hosts)]
        self._is_near, self._is_far = len(near) == self.size, len(firsts) == self.size
        is_first = session.rank in firsts
        self._among = FarPlane(session, f"{group}/hosts", firsts, timeout_s) if is_first else None

    # ---- one operation ---------------------------------------------------------------------------------------------

    def start(self, what: str, number: int, timeout_s: float, seals: bool) -> None:
        """Set name, place and deadline of the next operation, and whether its frames are always sealed."""
        self._all = self._all.of(what, number, timeout_s, seals)
        if self._among is not None:
            self._among = self._among.of(what, number, timeout_s + _LATER_S, seals)
        if self._neighbours is not None:
            self._neighbours.what, self._neighbours.timeout_s = what, timeout_s

    def early(self, what: str, number: int, timeout_s: float, seals: bool) -> FarPlane | None:
        """Return the plane of an allreduce that may begin before those before it are over; None: none may.

        Shared memory is used by one operation at a time.
        """
        return self._all.of(what, number, timeout_s, seals) if self._is_far else None

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce on each host, then among the hosts, then copy to the others of each host."""
        if self._is_near or self._is_far:
            self._flat.allreduce(source, target, how)
        else:
            allreduce_by_levels(source, target, how, self._near, self._among, self._near_broadcast)

    def _near_broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copy from a member of this host, which waits for others meanwhile."""
        if self._neighbours is None:
            return
        before = self._neighbours.timeout_s
        self._neighbours.timeout_s += 2 * _LATER_S
        try:
            self._near.broadcast(tensor, root)
        finally:
            self._neighbours.timeout_s = before

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy on the root's host, then to the other hosts, then on each of them."""
        if self._is_near:
            self._near.broadcast(tensor, root)
            return
        is_here = self._hosts[root] == self._hosts[self.index]
        if is_here:
            self._near_broadcast(tensor, self._near_members.index(self._members[root]))
        if self._among is not None:
            self._among.broadcast(tensor, list(dict.fromkeys(self._hosts)).index(self._hosts[root]))
        if not is_here:
            self._near_broadcast(tensor)

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Put all members' ``source`` one after the other."""
        self._flat.allgather(source, target, counts)

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Send elements to each member."""
        self._flat.alltoall(source, target, counts)

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Reduce, and put this member's part into ``target``."""
        self._flat.reducescatter(source, target, counts, how)

    @property
    def _flat(self) -> Plane:
        """The plane of operations that know no hosts."""
        return self._near if self._is_near else self._all

    def close(self) -> None:
        """Release the shared memory."""
        if self._neighbours is not None:
            self._neighbours.close()
