"""This process's part in a job: ``init``, ``shutdown``, ranks and sizes."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline import config
from paceline.collectives import link
from paceline.collectives.background import Background
from paceline.collectives.coordinator import Coordinator
from paceline.collectives.environment import HvdSettings, ProcessPlace, find_place, ranks_of, read_settings
from paceline.collectives.errors import CollectiveError, Interface, NotInitializedError
from paceline.collectives.negotiation.machine import ProcessSets
from paceline.collectives.negotiation.messages import VERSION, OperationRequest, RankEntered, RankStep
from paceline.collectives.planes.base import Alone
from paceline.collectives.planes.registry import Planes
from paceline.collectives.rendezvous import private_folder
from paceline.collectives.timeline import Timeline
from paceline.host import forks
from paceline.host.plain_text import text_of
from paceline.net.hosts import host_id
from paceline.wire.messages import StepBatch, WorkerStep
from paceline.worker.current import current_session
from paceline.worker.weight_sums import sums_of

#: Value of HOROVOD_TIMELINE with which timelines are started by calls.
DYNAMIC = "DYNAMIC"


class Base:
    """The objects that stay when a job is shut down: the link to the coordinator, and the planes."""

    def __init__(self, place: ProcessPlace, settings: config.Settings, hvd: HvdSettings) -> None:
        self.place, self.settings = place, settings
        self.timeline = Timeline()
        self.link = link.connect(place, settings, hvd, self.timeline)
        self.check: Callable[[], None] = current_session().check if settings.scheduler else lambda: None
        self.generation = 0
        self.planes: Planes | None = None
        self.planes_since = 0

    def drop_planes(self) -> None:
        """Forget planes whose state is not known after a failure."""
        if self.planes is not None:
            self.planes.close()
        self.planes, self.planes_since = None, 0

    def close(self) -> None:
        """Close the link."""
        self.drop_planes()
        self.link.close()


@dataclasses.dataclass(frozen=True)
class OptimizerSteps:
    """Steps of an optimizer for which :class:`World` compares weights.

    Attributes:
        since: the object :attr:`World.stepping` at the first of them.
        name: the same on all ranks that train these weights.
        count: the number of steps, on each of these ranks.
    """

    since: Counter[str]
    name: str
    count: int


class World:
    """The job between ``init`` and ``shutdown``."""

    def __init__(self, base: Base, hvd: HvdSettings, sets: tuple[tuple[int, ...], ...]) -> None:
        self.base, self.hvd = base, hvd
        self.rank, self.size = base.place.rank, base.place.size
        base.generation += 1
        self._joins, self.stepping = 0, Counter[str]()
        if self.rank == 0 and hvd.timeline and hvd.timeline.upper() != DYNAMIC:
            base.timeline.open(hvd.timeline, hvd.timeline_mark_cycles)
        if isinstance(base.link, Coordinator):
            base.link.settings = hvd
        host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        mine = RankEntered(VERSION, host, host_id(), os.getpid(), sets, base.planes_since)
        entered, early = link.enter(base.link, base.generation, self.rank, self.size, mine, hvd)
        self.background = Background(base.link, base.generation, self.rank, entered, early, hvd, base.timeline)
        self.background.check = base.check
        self.nodes = [(one.host, one.host_id) for one in entered.members]
        try:
            self._place()
            self._make_planes(entered.members)
        except BaseException as error:
            self.background.leave(f"rank {self.rank} could not start: {text_of(error)}", failed=True)
            base.drop_planes()
            raise

    def _place(self) -> None:
        nodes = list(dict.fromkeys(self.nodes))
        by_node = [[rank for rank in range(self.size) if self.nodes[rank] == node] for node in nodes]
        near = by_node[nodes.index(self.nodes[self.rank])]
        self.local_rank, self.local_size = near.index(self.rank), len(near)
        alike = [ranks for ranks in by_node if len(ranks) > self.local_rank]
        self.cross_rank, self.cross_size = alike.index(near), len(alike)
        self.is_homogeneous = len({len(ranks) for ranks in by_node}) == 1

    def _make_planes(self, members: Sequence[RankEntered]) -> None:
        base = self.base
        if len({one.planes_since for one in members}) > 1:
            base.drop_planes()
        if base.planes is None and self.size > 1:
            base.planes = Planes(
                self.rank, self.nodes, base.settings, self.hvd, private_folder(), self._exchange, base.check
            )
            base.planes_since = base.generation
        self.background.plane_for = base.planes.plane if base.planes is not None else lambda members, device: Alone()

    def _exchange(self, name: str, mine: bytes) -> Sequence[bytes]:
        payloads: Sequence[bytes] = self.background.call(
            OperationRequest("allgather_object", f"paceline {name}", payload=mine)
        )
        return payloads

    def count_step(
        self, steps: OptimizerSteps | None, named: Iterable[tuple[str, torch.Tensor]], ranks: Sequence[int]
    ) -> OptimizerSteps:
        """Count a step of an optimizer; from 1 since ``init`` or the last join, where ranks may have stepped unlike.

        Its name does not depend on what else this rank has wrapped, copied or loaded. Optimizers with alike parameters
        are told apart by the order of their first steps, as are their reductions. Without ``ranks`` all train them.
        """
        if steps is not None and steps.since is self.stepping:
            return dataclasses.replace(steps, count=steps.count + 1)
        text = repr((self._joins, ranks, sorted((name, tuple(param.shape)) for name, param in named)))
        what = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.stepping[what] += 1
        return OptimizerSteps(self.stepping, f"optimizer {what}.{self.stepping[what]}", 1)

    def note_join(self) -> None:
        """Count the steps of optimizers anew: all ranks have joined, after unlike numbers of steps perhaps."""
        self._joins, self.stepping = self._joins + 1, Counter[str]()

    def tell_step(
        self,
        name: str,
        step: int,
        weights: Mapping[str, torch.Tensor],
        ranks: Sequence[int] = (),
        batch: StepBatch | None = None,
    ) -> None:
        """Let rank 0 compare this rank's weights and batch of a step with those of the others. Does not wait.

        Name and step are the same on all ranks that train these weights: some, or all if none are given.
        """
        sums = sums_of(weights, step) if weights else []
        if self.size > 1 and (sums or batch is not None):
            self.background.note_step(RankStep(WorkerStep(name, step, sums, batch), tuple(ranks)))

    def leave(self) -> None:
        """End the job for all ranks."""
        self.background.leave("hvd.shutdown() was called")
        self.base.timeline.close()
        down = self.background.down
        if down is None or down.failed or self.background.has_failed:
            self.base.drop_planes()


_lock = threading.RLock()
_world: World | None = None
_bases: dict[tuple[int, int, str], Base] = {}
_exits = itertools.count()
_pid = os.getpid()
"""The process whose job this is. A forked child knows its parent's ranks, and takes no part."""


def current() -> World:
    """Return the job.

    Raises:
        NotInitializedError: ``init`` has not been called.
    """
    if _world is None:
        raise NotInitializedError
    return _world


def enter(comm: Any, sets: tuple[tuple[int, ...], ...], dynamic: bool, interface: Interface) -> None:
    """Start the job; see :func:`paceline.hvd.init`.

    Raises:
        CollectiveError: this process was forked from this rank of the job.
    """
    global _world
    if os.getpid() != _pid:
        _part()
    with _lock:
        if _world is not None:
            return
        settings = config.from_environment()
        hvd = read_settings()
        dynamic = dynamic or hvd.dynamic_process_sets
        hvd = dataclasses.replace(hvd, dynamic_process_sets=dynamic, interface=interface)
        place = find_place()
        if comm is not None:
            place = place.among(ranks_of(comm, "comm"))
        ProcessSets(place.size, sets)  # an error must come here, and not from the machine of all ranks
        key = place.rank, place.size, place.job
        base = _bases.get(key)
        if base is None or not base.link.is_open:
            if base is not None:
                base.close()
            base = _bases[key] = Base(place, settings, hvd)
            if next(_exits) == 0:  # after the session's: handlers run in reverse order, and its closes all sockets
                atexit.register(_at_exit)
        _world = World(base, hvd, sets)


def _part() -> None:
    """In a forked child: forget the parent's jobs, if this is another rank or another job.

    Raises:
        CollectiveError: it is the same rank, which the parent is.
    """
    global _world, _lock, _pid
    place = find_place()
    if (place.rank, place.size, place.job) in _bases:
        raise CollectiveError(forks.error_text(f"rank {place.rank}", _pid))
    _world, _lock, _pid = None, threading.RLock(), os.getpid()
    _bases.clear()


def leave() -> None:
    """End the job, if there is one. In a forked child it goes on, and this process knows its ranks no more."""
    global _world
    if os.getpid() != _pid:
        _world = None
        return
    with _lock:
        world, _world = _world, None
    if world is not None:
        world.leave()


def is_initialized() -> bool:
    """Return whether ``init`` has been called, and ``shutdown`` has not."""
    return _world is not None


def _at_exit() -> None:
    global _world
    if os.getpid() != _pid:
        return
    with _lock:
        world, _world = _world, None
        if world is not None:
            world.background.leave(f"the process of rank {world.rank} (pid {os.getpid()}) ended")
        for base in _bases.values():
            base.close()
        _bases.clear()
