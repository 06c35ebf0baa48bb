"""Process sets: operations of some ranks only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.collectives import world
from paceline.collectives.environment import ranks_of
from paceline.collectives.errors import CollectiveError, Interface
from paceline.collectives.negotiation.messages import GLOBAL_SET, OperationRequest
from paceline.worker import guard

#: ``process_set_ids`` is none of Horovod's module ``mpi_ops``.
__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """A set of ranks that run operations among themselves.

    Args:
        ranks_or_comm: ranks, or a communicator of mpi4py whose members they are.

    Attributes:
        process_set_id: its id; None while it is not part of a running job.
        ranks: ascending.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(ranks_of(ranks_or_comm, "a process set"))

    def size(self) -> int | None:
        """Return the number of ranks; None while it is not part of a running job."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's place in the set, -1 if it is not in it; None while it is not part of a running job."""
        if self.process_set_id is None or self.ranks is None:
            return None
        own = world.current().rank
        return self.ranks.index(own) if own in self.ranks else -1

    def included(self) -> bool | None:
        """Return whether this process is in the set; None while it is not part of a running job."""
        place = self.rank()
        return None if place is None else place >= 0

    def __reduce__(self) -> Any:
        """Copies and pickles are the set of these ranks in the job that loads them."""
        return _same_set, (None if self is global_process_set else self.ranks,)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


#: The set of all ranks.
global_process_set = ProcessSet([])

_registered: list[ProcessSet] = []


def enter(interface: Interface, comm: Any = None, sets: Sequence[ProcessSet] = (), *, dynamic: bool = False) -> None:
    """Join the job, with these process sets; see :func:`paceline.hvd.init`. A second call changes nothing."""
    if world.is_initialized():
        return
    guard.end_child()
    world.enter(comm, tuple(tuple(one.ranks or ()) for one in sets), dynamic, interface)
    register(sets)


def _same_set(ranks: list[int] | None) -> ProcessSet:
    """Return the set of the job with these ranks, a new one if there is none; None: the set of all ranks."""
    if ranks is None:
        return global_process_set
    return next((one for one in _registered if one.ranks == ranks), None) or ProcessSet(ranks)


def members_of(process_set: ProcessSet, root_rank: int | None = None) -> tuple[int, tuple[int, ...]]:
    """Return a set's id and ranks, checked: this process and the root are in it.

    Raises:
        ValueError: it is not part of the job, or this process or the root is not in it.
        CollectiveError: ``init`` has not been called.
    """
    running = world.current()
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not part of the job; pass it to hvd.init or hvd.add_process_set")
    members = running.background.sets.members(process_set.process_set_id)
    if running.rank not in members:
        raise ValueError(f"rank {running.rank} is not in {process_set}")
    if root_rank is not None and root_rank not in members:
        raise ValueError(f"root rank {root_rank} is not in the process set of ranks {list(members)}")
    return process_set.process_set_id, members


def register(sets: Iterable[ProcessSet]) -> None:
    """Give their ids to the set of all ranks and to the sets that ``init`` was given, after it."""
    global_process_set.process_set_id = GLOBAL_SET
    global_process_set.ranks = list(range(world.current().size))
    _registered[:] = list(sets)
    for number, one in enumerate(_registered):
        one.process_set_id = number + 1


def unregister() -> None:
    """Take the ids of all sets away, after ``shutdown``."""
    for one in (global_process_set, *_registered):
        one.process_set_id = None
    _registered.clear()


def _check_dynamic() -> None:
    if not world.current().hvd.dynamic_process_sets:
        raise ValueError(
            "process sets can be changed only with HOROVOD_DYNAMIC_PROCESS_SETS=1 or hvd.init(process_sets='dynamic')"
        )


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set. All ranks of the job call it, in the same order.

    Raises:
        ValueError: the ranks are in a set already, or are no ranks of the job; or sets cannot be changed.
    """
    _check_dynamic()
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if one.process_set_id is not None:
        raise ValueError(f"{one} is part of the job already")
    ranks = tuple(one.ranks or ())
    try:
        one.process_set_id = world.current().background.call(
            OperationRequest("add_process_set", "process sets", ranks=ranks)
        )
    except CollectiveError as error:
        if world.current().background.down is None:
            raise ValueError(str(error)) from error
        raise
    _registered.append(one)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks of the job call it, in the same order.

    Returns:
        Whether it was removed; the global set is not.
    """
    _check_dynamic()
    if process_set.process_set_id in (None, GLOBAL_SET):
        return False
    ranks = tuple(process_set.ranks or ())
    removed: bool = (
        world.current().background.call(OperationRequest("remove_process_set", "process sets", ranks=ranks)) >= 0
    )
    if removed:
        process_set.process_set_id = None
        _registered[:] = [one for one in _registered if one is not process_set]
    return removed


def process_set_ids() -> list[int]:
    """Return the ids of all process sets."""
    return [GLOBAL_SET, *(one.process_set_id for one in _registered if one.process_set_id is not None)]
