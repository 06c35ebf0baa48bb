"""Planes of ranks on several hosts: what one host can do by itself does not pass between hosts.

| operation | ranks of one host | ranks of several hosts |
|---|---|---|
| allreduce | shared memory | reduced on each host, then among the first ranks of the hosts, then copied on each host |
| broadcast | shared memory | to the root's host, then to the first ranks of the hosts, then on each host |
| others | shared memory | among all ranks |

Between hosts Gloo moves the data of ``hvd`` and of the all-reduce store, the job's servers those of a process group.
Without shared memory (``PACELINE_SHARED_MEMORY=0``, or processes that may not map each other's memory) every rank is a
host of its own.

Deadlines: a rank waits longer for another host than for its own, and longest for what its own host gets from others. So
the rank that fails first is the one that waits for the missing one itself, and its error names that one.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence

import torch

from paceline.collectives.planes.base import AVERAGE, SUM, Plane, Reduction
from paceline.collectives.planes.servers import FarPlane
from paceline.collectives.planes.shared import Neighbours, near_plane, share_memory
from paceline.worker.session import Session

#: Seconds by which each level waits longer than the one below it.
_LATER_S = 2.0


def first_members(members: Sequence[int], hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the first member of each host; ``hosts`` are those of the members."""
    return tuple([members[hosts.index(host)] for host in dict.fromkeys(hosts)])


class LevelsPlane:
    """The plane of members on several hosts.

    Args:
        members: ranks.
        hosts: the host of each member.
        index: place of this rank among the members.
        neighbours: the shared memory of this host.
        everyone: the plane of all members.
        among: the plane of the first members of the hosts; None where this rank is not one of them.
        shares_areas: see :class:`paceline.collectives.planes.shared.SharedPlane`.
    """

    def __init__(
        self,
        members: Sequence[int],
        hosts: Sequence[Hashable],
        index: int,
        neighbours: Neighbours | None,
        everyone: Plane,
        among: Plane | None,
        *,
        shares_areas: bool = False,
    ) -> None:
        self.index, self.size = index, len(members)
        self._hosts, self._neighbours, self._everyone, self._among = list(hosts), neighbours, everyone, among
        self._near_places = [place for place, host in enumerate(hosts) if host == hosts[index]]
        self._near = near_plane(neighbours, [members[place] for place in self._near_places], shares_areas)

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce on each host, then among the hosts, then copy to the others of each host.

        Factors are applied before the first and after the last reduction, so rounding is as without levels.
        """
        work = how.load_into(source, target)
        plain = Reduction(SUM if how.op == AVERAGE else how.op, work.dtype, 1)
        self._near.allreduce(work, work, plain)
        if self._among is not None:
            self._among.allreduce(work, work, plain)
        self._near_broadcast(work)
        how.store(work, target)

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
        is_here = root in self._near_places
        if is_here:
            self._near_broadcast(tensor, self._near_places.index(root))
        if self._among is not None:
            self._among.broadcast(tensor, list(dict.fromkeys(self._hosts)).index(self._hosts[root]))
        if not is_here:
            self._near_broadcast(tensor)

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Put all members' ``source`` one after the other."""
        self._everyone.allgather(source, target, counts)

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Send elements to each member."""
        self._everyone.alltoall(source, target, counts)

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Reduce, and put this member's part into ``target``."""
        self._everyone.reducescatter(source, target, counts, how)


class GroupPlanes:
    """The planes of a process group's ranks. Made by all of them.

    Attributes:
        plane: carries out the operation that :meth:`start` has named.
    """

    def __init__(self, session: Session, group: str, members: Sequence[int], timeout_s: float) -> None:
        self._far = far = FarPlane(session, group, members, timeout_s)
        hosts: list[Hashable] = [session.workers[rank].host_id for rank in members]
        near = [rank for rank, host in zip(members, hosts, strict=True) if host == hosts[far.index]]
        self._neighbours, shares = share_memory(
            session.rank, near, session.settings.shared_memory, timeout_s,
            lambda mine: dict(zip(members, far.swap_bytes(mine), strict=True)), session.check,
        )  # fmt: skip
        firsts = first_members(members, hosts if shares else members)
        self._among = FarPlane(session, f"{group}/hosts", firsts, timeout_s) if session.rank in firsts else None
        self._is_far = len(firsts) == len(members)
        self.plane: Plane = far
        if len(firsts) == 1:
            self.plane = near_plane(self._neighbours, members)
        elif not self._is_far:
            self.plane = LevelsPlane(members, hosts, far.index, self._neighbours, far, self._among)

    def start(self, what: str, number: int, timeout_s: float, seals: bool) -> None:
        """Set name, place and deadline of the next operation, and whether its frames are always sealed."""
        self._far.name(what, number, timeout_s, seals)
        if self._among is not None:
            self._among.name(what, number, timeout_s + _LATER_S, seals)
        if self._neighbours is not None:
            self._neighbours.what, self._neighbours.timeout_s = what, timeout_s

    def early(self, what: str, number: int, timeout_s: float, seals: bool) -> FarPlane | None:
        """Return the plane of an allreduce that may begin before those before it are over; None: none may.

        Shared memory is used by one operation at a time.
        """
        if not self._is_far:
            return None
        found = copy.copy(self._far)
        found.name(what, number, timeout_s, seals)
        return found

    def close(self) -> None:
        """Release the shared memory."""
        if self._neighbours is not None:
            self._neighbours.close()
