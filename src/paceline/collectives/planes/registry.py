"""Makes the planes of a job's process sets, and keeps them over ``shutdown`` and ``init``."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from paceline.collectives.environment import HvdSettings
from paceline.collectives.planes.base import Alone, Plane, Staged
from paceline.collectives.planes.hosts import LevelsPlane, first_members
from paceline.collectives.planes.shared import near_plane, share_memory
from paceline.collectives.planes.torch_group import GroupPlane, gpus_are_apart, make_gloo, make_nccl, own_gpu
from paceline.collectives.rendezvous import address_here
from paceline.config import Settings
from paceline.naming import listed

logger = logging.getLogger(__name__)

#: Sends this rank's bytes to all ranks; returns those of all.
Exchange = Callable[[str, bytes], Sequence[bytes]]


class Planes:
    """The planes of one job. Made and used by all ranks in the same order.

    Args:
        nodes: the host of each rank; ranks of one host can share memory.
        folder: private folder for files of this host.
        exchange: brings bytes of each rank to all.
        check: raises where the job has failed.
    """

    def __init__(
        self,
        rank: int,
        nodes: Sequence[Any],
        settings: Settings,
        hvd: HvdSettings,
        folder: Path,
        exchange: Exchange,
        check: Callable[[], None],
    ) -> None:
        self._rank, self._nodes, self._hvd = rank, list(nodes), hvd
        self._near = [one for one in range(len(nodes)) if nodes[one] == nodes[rank]]
        self._one_host = len(self._near) == len(nodes)
        self._planes: dict[tuple[tuple[int, ...], str], Plane] = {}
        self._store: Store | None = None
        self._address = "127.0.0.1" if self._one_host else address_here(settings)
        self._where = exchange("store", self._open_store(folder).encode() if rank == 0 else b"")[0].decode()
        self._neighbours, self._shares = share_memory(
            rank, self._near, settings.shared_memory, hvd.timeout_s,
            lambda mine: dict(enumerate(exchange("shared memory", mine))), check,
        )  # fmt: skip

    # ---- planes ----------------------------------------------------------------------------------------------------

    def plane(self, members: tuple[int, ...], device: str) -> Plane:
        """Return the plane of a process set for tensors of a type of device; for CUDA it is the current one.

        NCCL moves those of CUDA where every member has it and a GPU of its own. Else they go over host memory, by the
        plane of tensors that are there.
        """
        found = self._planes.get((members, device))
        if found is None:
            if device == "cpu" or len(members) == 1 or (device == "cuda" and self._nccl_connects(members)):
                found = self._make(members, device)
            else:
                found = Staged(self.plane(members, "cpu"))
            self._planes[members, device] = found
        return found

    def _nccl_connects(self, members: tuple[int, ...]) -> bool:
        store = PrefixStore(f"gpus{members}", self._open())
        apart = gpus_are_apart(store, self._rank, members, own_gpu(), self._hvd.timeout_s)
        if not apart and self._rank == members[0]:
            logger.warning(
                "CUDA tensors of ranks %s go over host memory: some of the ranks share a GPU, or have no NCCL",
                listed(members, 8),
            )
        return apart

    def _make(self, members: tuple[int, ...], kind: str) -> Plane:
        if len(members) == 1:
            return Alone()
        if kind == "cuda":
            store = PrefixStore(f"nccl{members}", self._open())
            return make_nccl(store, members.index(self._rank), len(members), self._hvd.timeout_s)
        near = [one for one in members if one in self._near]
        if self._neighbours is not None and len(near) == len(members):
            return near_plane(self._neighbours, near, near != self._near)
        everyone = self._gloo("all", members)
        hosts = [self._nodes[one] for one in members]
        firsts = first_members(members, hosts)
        if not (self._hvd.hierarchical and self._shares) or len(firsts) == len(members):
            return everyone
        among = self._gloo("leaders", firsts) if self._rank in firsts else None
        return LevelsPlane(
            members, hosts, everyone.index, self._neighbours, everyone, among, shares_areas=near != self._near
        )

    def _gloo(self, purpose: str, members: tuple[int, ...]) -> GroupPlane:
        store = PrefixStore(f"gloo {purpose}{members}", self._open())
        index = members.index(self._rank)
        return make_gloo(store, index, len(members), self._hvd.timeout_s, self._address)

    # ---- the store by which process groups meet ----------------------------------------------------------------------

    def _open_store(self, folder: Path) -> str:
        if self._one_host:
            return f"file:{folder / secrets.token_hex(16)}.store"
        store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self._store = store
        return f"tcp:{self._address}:{store.port}"

    def _open(self) -> Store:
        if self._store is None:
            kind, _, rest = self._where.partition(":")
            if kind == "file":
                self._store = FileStore(rest, -1)
            else:
                host, _, port = rest.rpartition(":")
                self._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        return self._store

    def close(self) -> None:
        """Release shared memory and the store."""
        if self._neighbours is not None:
            self._neighbours.close()
        if self._rank == 0 and self._where.startswith("file:"):
            Path(self._where.removeprefix("file:")).unlink(missing_ok=True)
