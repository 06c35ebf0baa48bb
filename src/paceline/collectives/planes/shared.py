"""Collective operations of ranks on one host, through shared memory.

An operation goes in steps: each rank writes a chunk into an area of its segment, sends a mark to every other member,
waits for theirs, and reads their areas. A rank shows the next chunk before it waits for the marks of this one. So ranks
of about the same pace find marks that are there already, and do not sleep: to wake up takes longer than a chunk.

Four areas take turns. A rank that has sent the mark of step k has read the areas of step k - 2. One that writes the
chunk of step k + 1 has the marks of step k - 1 from all, so all have read step k - 3, whose areas it takes. That holds
for planes of all ranks of the host, which have four areas for themselves. Planes of other process sets share four more,
and end each operation with one more wait.

A mark names the operation, and is compared before an area is read: no rank takes elements of another operation.

Traffic of an allreduce of N bytes on each of two ranks: read N, write N to the area, read N of the other's and N of the
own (still in the core's cache), write N. Only the bytes of the waits pass the kernel.

Elements are combined in the order of the ranks wherever they lie, so a result does not depend on how tensors are fused.

| timeout | must exceed |
|---|---|
| ``timeout_s`` of a wait | the longest pause of a rank inside of an operation |

A rank that is killed closes its pipes, so the others notice at once. Children that it has forked close their copies
(:mod:`paceline.host.forks`). Those of C code do not: so a rank that waits looks at the other's process, and at the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from paceline.collectives.errors import CollectiveError, RankEndedError
from paceline.collectives.planes.base import Alone, Plane, Reduction
from paceline.collectives.silence import Silence
from paceline.errors import ProtocolError
from paceline.host import forks
from paceline.net.memory import SharedTensor, map_foreign
from paceline.net.streaming import stream_copy

logger = logging.getLogger(__name__)

#: Bytes of an area. Each step costs Python 20 us; more bytes are no faster.
AREA_BYTES = 1024 * 1024

#: Chunks that a rank shows before it waits for those of the others, and areas that take turns for that.
_AHEAD = 1
_TURNS = 2 * _AHEAD + 2
_AREAS = 2 * _TURNS

#: Bytes of a mark: fewer than a pipe takes at once, so marks arrive whole.
_MARK_BYTES = 64

#: Returns the area of a rank.
_AreaOf: TypeAlias = Callable[[int], torch.Tensor]

#: Interval at which a rank that is waited for is looked at.
_LOOK_S = 1.0


@dataclass
class Turns:
    """Areas that take turns.

    Attributes:
        first: the first of them.
        step: steps so far, the same on all ranks that use them.
    """

    first: int
    step: int = 0


class Offer:
    """The parts that a rank makes for the others: its segment, and a pipe from each of them."""

    def __init__(self, others: Sequence[int], area_bytes: int = AREA_BYTES) -> None:
        self.area_bytes = area_bytes
        self.segment = SharedTensor(_AREAS * area_bytes, torch.uint8)
        self.readers: dict[int, int] = {}
        self.writers: dict[int, int] = {}
        with forks.held():
            forks.in_children(self, Offer.close)
            for rank in others:
                self.readers[rank], self.writers[rank] = ends = os.pipe()
                for one in ends:
                    os.set_blocking(one, False)

    def describe(self) -> list[object]:
        """Return the ids of its process, segment and pipes, with which the others open it."""
        return [os.getpid(), self.segment.fd, list(self.writers.items())]

    def close_writers(self) -> None:
        """Close this process's copies of the writing ends, when the others have opened theirs."""
        for writer in self.writers.values():
            os.close(writer)
        self.writers = {}

    def close(self) -> None:
        """Close everything."""
        self.close_writers()
        for reader in self.readers.values():
            os.close(reader)
        self.readers = {}
        self.segment.close()


class Neighbours:
    """The shared memory of all ranks of this host.

    Attributes:
        what: the operation, for those who do not agree on their order before; unlike ones are refused.
        turns: the areas of planes of all ranks of this host.
        check: raises where the job has failed; called while a wait is long.

    Raises:
        OSError, ProtocolError: this process may not open what another one offers.
    """

    def __init__(self, rank: int, offer: Offer, described: Mapping[int, Sequence[object]], timeout_s: float) -> None:
        self.rank, self.timeout_s, self.what = rank, timeout_s, ""
        self.check: Callable[[], None] = lambda: None
        self._offer, self.area_bytes, self.turns = offer, offer.area_bytes, Turns(0)
        self.areas: dict[int, torch.Tensor] = {rank: offer.segment.tensor}
        self._writers: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        forks.in_children(self, Neighbours.close)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            for other, (pid, fd, writers) in described.items():
                assert isinstance(pid, int)
                assert isinstance(fd, int)
                self._pids[other] = pid
                self.areas[other] = map_foreign(pid, fd, _AREAS * offer.area_bytes, torch.uint8)
                writer = dict(writers)[rank]  # type: ignore[call-overload]
                with forks.held():
                    end = os.open(f"/proc/{pid}/fd/{writer}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                    self._writers[other] = end
            on_error.pop_all()
        self._polls: dict[int, select.poll] = {}

    def call(self, others: Sequence[int]) -> None:
        """Send a mark to all others.

        Raises:
            CollectiveError: one of them ended.
        """
        mark = self._mark
        for rank in others:
            try:
                os.write(self._writers[rank], mark)
            except OSError as error:
                raise RankEndedError(f"rank {rank} ended during an operation: {error}") from error

    @property
    def _mark(self) -> bytes:
        return self.what.encode()[:_MARK_BYTES].ljust(_MARK_BYTES)

    def wait(self, others: Sequence[int]) -> None:
        """Wait for a mark of all others.

        Raises:
            CollectiveError: one of them ended, or did not come in time.
            ProtocolError: one of them is in another operation.
        """
        mark = self._mark
        for place, rank in enumerate(others):
            if (theirs := self._wait(rank, others[place + 1 :])) != mark:
                raise ProtocolError(
                    f"rank {rank} called {theirs.decode(errors='replace').strip()}, but rank {self.rank} called "
                    f"{self.what}; all ranks of a group must call the same operations in the same order"
                )

    def _wait(self, rank: int, later: Sequence[int]) -> bytes:
        reader, silence = self._offer.readers[rank], Silence(self._pids[rank])
        while True:
            try:
                mark: bytes = os.read(reader, _MARK_BYTES)
                if not mark:
                    raise RankEndedError(f"rank {rank} ended before it came to {self.what}")
                return mark
            except BlockingIOError:
                if silence.is_gone:
                    raise RankEndedError(f"rank {rank} ended before it came to {self.what}") from None
                left_s = self.timeout_s - silence.counted_s
                if left_s <= 0:
                    missing = [rank, *(one for one in later if not self._has_come(one))]
                    raise CollectiveError(
                        f"{' and '.join(f'rank {one}' for one in missing)} did not go on with an operation within "
                        f"{self.timeout_s:g} s"
                    ) from None
                began, slice_s = time.monotonic(), min(left_s, _LOOK_S)
                if not self._has_come(rank, slice_s):
                    self.check()
                silence.note(min(slice_s, time.monotonic() - began))

    def _has_come(self, rank: int, wait_s: float = 0.0) -> bool:
        poll = self._polls.get(rank)
        if poll is None:
            poll = self._polls[rank] = select.poll()  # takes descriptors above 1023, as select does not
            poll.register(self._offer.readers[rank], select.POLLIN)
        return bool(poll.poll(1000 * wait_s))

    def close(self) -> None:
        """Close everything."""
        for writer in self._writers.values():
            os.close(writer)
        self._writers = {}
        self._offer.close()


def share_memory(
    rank: int,
    near: Sequence[int],
    wanted: bool,
    timeout_s: float,
    exchange: Callable[[bytes], Mapping[int, bytes]],
    check: Callable[[], None] = lambda: None,
) -> tuple[Neighbours | None, bool]:
    """Map the memory of this host's other ranks, if the ranks of every host can: all take the same ways then.

    ``exchange`` sends bytes to all ranks of all hosts, and returns those of all; ``check`` see :class:`Neighbours`.

    Returns:
        The shared memory, None where there is none or nobody else; and whether all ranks share that of their hosts.
    """
    others = [one for one in near if one != rank]
    offer = found = None
    with contextlib.ExitStack() as otherwise:
        try:
            if others and wanted:
                offer = Offer(others)
                otherwise.callback(offer.close)
        except OSError as error:
            logger.warning("rank %d has no memory that it can share, so none do: %s", rank, error)
        described = exchange(json.dumps([] if offer is None else offer.describe()).encode())
        offers = {one: json.loads(described[one]) for one in others}
        try:
            if offer is not None and all(offers.values()):
                found = Neighbours(rank, offer, offers, timeout_s)
                otherwise.callback(found.close)
        except (OSError, ProtocolError) as error:
            logger.warning("rank %d cannot share memory with other ranks of this host, so none do: %s", rank, error)
        agreed = set(exchange(b"no" if found is None and others else b"yes").values()) == {b"yes"}
        if offer is not None and found is not None and agreed:
            offer.close_writers()
            found.check = check
            otherwise.pop_all()
            return found, True
    return None, agreed


def near_plane(neighbours: Neighbours | None, members: Sequence[int], shares_areas: bool = False) -> Plane:
    """Return the plane of some ranks of this host; see :class:`SharedPlane`."""
    if neighbours is None or len(members) == 1:
        return Alone()
    return SharedPlane(neighbours, members, shares_areas)


class SharedPlane:
    """The plane of ranks of one host.

    Args:
        members: ranks of the process set, ascending.
        shares_areas: it is not a plane of all ranks of the host.
    """

    def __init__(self, neighbours: Neighbours, members: Sequence[int], shares_areas: bool) -> None:
        self._near = neighbours
        self._turns, self._shares_areas = Turns(_TURNS) if shares_areas else neighbours.turns, shares_areas
        self.members = list(members)
        self.index, self.size = self.members.index(neighbours.rank), len(members)
        self._others = [rank for rank in members if rank != neighbours.rank]
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def _area(self, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a rank's area of a step."""
        area = self._turns.first + step % _TURNS
        found = self._views.get((rank, area, dtype))
        if found is None:
            size = self._near.area_bytes
            found = self._near.areas[rank][area * size : (area + 1) * size].view(dtype)
            self._views[rank, area, dtype] = found
        return found

    def _exchange(self, source: torch.Tensor, numel: int, take: Callable[[int, int, _AreaOf], None]) -> None:
        """Show a tensor chunk by chunk, and take from the areas of all ranks.

        Args:
            source: what this rank shows.
            numel: most elements that a rank shows.
            take: called for each chunk with its range, when all ranks show it.
        """
        chunk, begun = self._near.area_bytes // source.itemsize, self._turns.step
        starts = range(0, numel, chunk)
        shown = 0
        for place, start in enumerate(starts):
            for ahead in starts[shown : place + 1 + _AHEAD]:
                part = source[ahead : ahead + chunk]
                if part.numel():
                    stream_copy(self._area(self._near.rank, begun + shown, source.dtype)[: part.numel()], part)
                self._near.call(self._others)
                shown += 1
            self._near.wait(self._others)
            take(start, min(numel, start + chunk), partial(self._area, step=begun + place, dtype=source.dtype))
            self._turns.step += 1
        if self._shares_areas and numel:
            self._near.call(self._others)
            self._near.wait(self._others)

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce chunk by chunk; every rank computes all of it."""

        def take(start: int, stop: int, area: _AreaOf) -> None:
            self._reduce(source[start:stop], target[start:stop], 0, area, how)

        self._exchange(source, source.numel(), take)

    def _reduce(self, mine: torch.Tensor, target: torch.Tensor, start: int, area: _AreaOf, how: Reduction) -> None:
        """Reduce all ranks' elements of a chunk from ``start`` on; ``mine`` are this rank's."""
        stop = start + mine.numel()
        parts = [mine if rank == self._near.rank else area(rank)[start:stop] for rank in self.members]
        if self.index > 1 and how.is_plain and mine.data_ptr() == target.data_ptr():
            # In place the own elements would be overwritten before it is their turn.
            parts[self.index] = area(self._near.rank)[start:stop]
        how.reduce(parts, target)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor chunk by chunk."""

        def take(start: int, stop: int, area: _AreaOf) -> None:
            if self.index != root:
                tensor[start:stop].copy_(area(self.members[root])[: stop - start])

        self._exchange(tensor if self.index == root else tensor[:0], tensor.numel(), take)

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Copy all ranks' tensors chunk by chunk."""
        starts = [sum(counts[:one]) for one in range(self.size)]

        def take(start: int, stop: int, area: _AreaOf) -> None:
            for one, rank in enumerate(self.members):
                end = min(stop, counts[one])
                if end > start:
                    target[starts[one] + start : starts[one] + end].copy_(area(rank)[: end - start])

        self._exchange(source, max(counts), take)

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Show all that is sent; every rank takes its part."""
        firsts = [sum(row[: self.index]) for row in counts]
        places = [sum(row[self.index] for row in counts[:one]) for one in range(self.size)]

        def take(start: int, stop: int, area: _AreaOf) -> None:
            for one, rank in enumerate(self.members):
                begin, end = max(start, firsts[one]), min(stop, firsts[one] + counts[one][self.index])
                if end > begin:
                    part = target[places[one] + begin - firsts[one] : places[one] + end - firsts[one]]
                    part.copy_(area(rank)[begin - start : end - start])

        self._exchange(source, max(map(sum, counts)), take)

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Show all chunks, and reduce those that hold this rank's part."""
        first = sum(counts[: self.index])
        last = first + counts[self.index]

        def take(start: int, stop: int, area: _AreaOf) -> None:
            begin, end = max(start, first), min(stop, last)
            if end > begin:
                self._reduce(source[begin:end], target[begin - first : end - first], begin - start, area, how)

        self._exchange(source, source.numel(), take)
