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

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.c10d.far import FarPlane
from paceline.errors import ProtocolError
from paceline.hvd.planes.base import AVERAGE, SUM, Alone, Plane, Reduction
from paceline.hvd.planes.shared import Neighbours, Offer, SharedPlane
from paceline.worker.session import Session

logger = logging.getLogger(__name__)

#: Seconds by which each level waits longer than the one below it.
_LATER_S = 2.0


class HostsPlane:
    """The plane of a group's ranks. Made by all of them.

    Args:
        session: the job.
        group: name of the group.
        members: ranks of the members, in the group's order.
        timeout_s: longest wait for other members.
    """

    def __init__(self, session: Session, group: str, members: Sequence[int], timeout_s: float) -> None:
        self.index, self.size = list(members).index(session.rank), len(members)
        self._members = list(members)
        self._all = FarPlane(session, group, members, timeout_s)
        hosts = [session.workers[rank].host_id for rank in members]
        near = [rank for rank, host in zip(members, hosts, strict=True) if host == hosts[self.index]]
        shares, self._neighbours = self._share(session, near, timeout_s)
        if not shares:
            hosts, near = [str(rank) for rank in members], [session.rank]
        self._near_members = near
        self._near: Plane = Alone() if self._neighbours is None else SharedPlane(self._neighbours, near, False)
        self._host_of = dict(zip(members, hosts, strict=True))
        self._first_of = {self._host_of[rank]: rank for rank in reversed(members)}
        self._firsts = [rank for rank in members if self._first_of[self._host_of[rank]] == rank]
        self._is_near = len(near) == self.size
        self._is_far = len(self._firsts) == self.size
        is_first = self._rank in self._firsts
        self._among = FarPlane(session, f"{group}/hosts", self._firsts, timeout_s) if is_first else None

    @property
    def _rank(self) -> int:
        return self._members[self.index]

    def _share(self, session: Session, near: Sequence[int], timeout_s: float) -> tuple[bool, Neighbours | None]:
        """Map the memory of this host's other members; returns whether all members of the group could, and it."""
        others = [rank for rank in near if rank != session.rank]
        offer = Offer(others) if others and session.settings.shared_memory else None
        described = json.dumps([] if offer is None else offer.describe()).encode()
        offers = dict(zip(self._members, map(json.loads, self._all.swap_bytes(described)), strict=True))
        found = None
        try:
            if offer is not None and all(offers[rank] for rank in others):
                found = Neighbours(session.rank, offer, {rank: offers[rank] for rank in others}, timeout_s)
        except (OSError, ProtocolError) as error:
            logger.warning("ranks of this host meet at the servers, because they cannot share memory: %s", error)
        # One answer for the whole group, so that all members have the same picture of the hosts.
        mine = b"yes" if found is not None or not others else b"no"
        agreed = self._all.swap_bytes(mine) == [b"yes"] * self.size
        if offer is not None and found is not None and agreed:
            offer.close_writers()
            return True, found
        if found is not None:
            found.close()
        elif offer is not None:
            offer.close()
        return agreed, None

    # ---- one operation ---------------------------------------------------------------------------------------------

    def start(self, what: str, number: int, timeout_s: float) -> None:
        """Set name, place and deadline of the next operation."""
        self._all = self._all.of(what, number, timeout_s)
        if self._among is not None:
            self._among = self._among.of(what, number, timeout_s + _LATER_S)
        if self._neighbours is not None:
            self._neighbours.what, self._neighbours.timeout_s = what, timeout_s

    def early(self, what: str, number: int, timeout_s: float) -> FarPlane | None:
        """Return the plane of an allreduce that may begin before those before it are over; None: none may.

        Shared memory is used by one operation at a time.
        """
        return self._all.of(what, number, timeout_s) if self._is_far else None

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce on each host, then among the hosts, then copy to the others of each host.

        Factors are applied before the first and after the last reduction, so rounding is as without levels.
        """
        if self._is_near:
            self._near.allreduce(source, target, how)
            return
        if self._is_far:
            self._all.allreduce(source, target, how)
            return
        work = how.load(source)
        if work is source:
            target.copy_(source)
            work = target
        inner = Reduction(SUM if how.op == AVERAGE else how.op, work.dtype, self.size)
        self._near.allreduce(work, work, inner)
        if self._among is not None:
            self._among.allreduce(work, work, replace(inner, size=self._among.size))
        self._near_broadcast(work, self._near_members[0])
        how.store(work, target)

    def _near_broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self._neighbours is None:
            return
        before = self._neighbours.timeout_s
        self._neighbours.timeout_s += 2 * _LATER_S
        try:
            self._near.broadcast(tensor, self._near_members.index(root))
        finally:
            self._neighbours.timeout_s = before

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy on the root's host, then to the other hosts, then on each of them."""
        if self._is_near:
            self._near.broadcast(tensor, root)
            return
        source = self._members[root]
        first = self._first_of[self._host_of[source]]
        if self._host_of[source] == self._host_of[self._rank]:
            self._near_broadcast(tensor, source)
        if self._among is not None:
            self._among.broadcast(tensor, self._firsts.index(first))
        if self._host_of[source] != self._host_of[self._rank]:
            self._near_broadcast(tensor, self._near_members[0])

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
