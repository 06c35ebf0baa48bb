"""Collective operations of ranks on several hosts, by meetings at the job's servers.

Workers only open connections: the data of one rank for another one goes through a server, over the connections that
both have opened (see :mod:`paceline.server.meetings`). Servers compute nothing. An allreduce of N bytes is cut into
chunks. Of each chunk every rank gets the part that it reduces, in the order of the ranks, and gives the result to all.
So a rank of many sends N bytes, and receives 2 N. Chunks take turns with the servers, and some are under way at a time,
so both directions of a link are in use.

Tensors of two ranks, and small ones, go to all ranks at once, and each reduces all of them: one meeting instead of two.
Two ranks send and receive N bytes either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from paceline.collectives.planes.base import Reduction
from paceline.layout.tensors import from_frame, to_frame
from paceline.net.base import Frames, sealed
from paceline.wire import messages as m
from paceline.worker.session import Session

#: Bytes of a chunk, and chunks under way. Of two ranks each sends whole chunks, so theirs are smaller.
CHUNK_BYTES, WINDOW = 4 * 2**20, 4
PAIR_CHUNK_BYTES, PAIR_WINDOW = 2**20, 8

#: A tensor of at least so many bytes per chunk has so many chunks: while one comes, another one goes.
LEAST_CHUNK_BYTES, LEAST_CHUNKS = 128 * 1024, 2

#: Bytes up to which every rank gets all tensors, and reduces them itself.
SMALL_BYTES = 32 * 1024

#: Meetings of one operation that have numbers of their own. A prime: operations of one meeting take turns with the
#: servers, however many these are.
MEETINGS = 1_048_573

#: A rank's frames for others, by receiver (-1: all), and those that it gets, by sender.
Parts: TypeAlias = Sequence[tuple[int, torch.Tensor]]
Got: TypeAlias = dict[int, list[memoryview]]
_Chunk: TypeAlias = Generator["Swap", Got, None]


def server_of(session: Session, group: str, number: int = 0) -> int:
    """Return the server of a group's meeting: meetings take turns, and groups begin with unlike servers."""
    return (sum(group.encode()) + number) % len(session.servers)


class Swap:
    """A meeting that this rank has come to.

    Args:
        frames: what this rank gives; they stay unchanged until the answer.
        whose: name of the group and operation, for errors.
    """

    def __init__(self, session: Session, server: int, body: m.Request, frames: Frames, whose: str) -> None:
        self._session, self._got = session, Got()
        self._call = session.ask_server(server, body, whose, frames, self._take)

    def _take(self, body: m.Body, frames: Frames) -> None:
        assert isinstance(body, m.Met)
        for sender, frame in zip(body.senders, frames, strict=True):
            self._got.setdefault(sender, []).append(frame)

    def wait(self, timeout_s: float) -> Got:
        """Return the frames by sender.

        Raises:
            DeadlineError: not all members came in time; the text names them.
            PeerDiedError: a member of the job died.
            ProtocolError: a member came with another operation.
        """
        self._session.wait([self._call], timeout_s)
        return self._got


class FarPlane:
    """The plane of ranks that meet at servers.

    Args:
        group: name of the group, the same on all members and of no other group.

    Attributes:
        what: the operation, for errors; unlike ones are refused.
        seals: its frames are sealed, whatever ``PACELINE_ENCRYPT`` says.
    """

    def __init__(self, session: Session, group: str, members: Sequence[int], timeout_s: float) -> None:
        self._session, self.group, self.members, self.timeout_s = session, group, list(members), timeout_s
        self.index, self.size = self.members.index(session.rank), len(members)
        self._number, self.what, self.seals = 0, "the start", False

    def name(self, what: str, number: int, timeout_s: float, seals: bool) -> None:
        """Name the next operation.

        ``number`` is its place in the group's order, on all ranks the same: they may begin operations in another order.
        """
        self.what, self._number, self.timeout_s, self.seals = what, number * MEETINGS, timeout_s, seals

    def begin(self, parts: Parts) -> Swap:
        """Give frames to other members, and do not wait."""
        number = self._number = self._number + 1
        body = m.Meet(self.group, number, self.members, self.what, [to for to, _ in parts])
        frames = [sealed(to_frame(part)) if self.seals else to_frame(part) for _, part in parts]
        server = server_of(self._session, self.group, number)
        return Swap(self._session, server, body, frames, f"{self.what} of group {self.group!r}")

    def swap(self, parts: Parts) -> Got:
        """Give frames to other members, and return theirs."""
        return self.begin(parts).wait(self.timeout_s)

    def swap_bytes(self, mine: bytes) -> list[bytes]:
        """Return the bytes of every member, in their order."""
        got = self.swap([(-1, torch.frombuffer(bytearray(mine), dtype=torch.uint8))])
        return [mine if rank == self._rank else bytes(got[rank][0]) for rank in self.members]

    @property
    def _rank(self) -> int:
        return self.members[self.index]

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.members if rank != self._rank]

    # ---- operations ------------------------------------------------------------------------------------------------

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> None:
        """Reduce chunk by chunk."""
        self.begin_allreduce(source, target, how)()

    def begin_allreduce(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> Callable[[], None]:
        """Give the first chunks, and do not wait; returns a function that does the rest."""
        reduce = self._reduce_whole if self.size == 2 or source.nbytes <= SMALL_BYTES else self._reduce_chunk
        ranges = self._ranges(source.numel(), source.itemsize)
        return self._begin_chunks(reduce(source[one], target[one], how) for one in ranges)

    def _reduce_whole(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> _Chunk:
        got = yield self.begin([(-1, source)])
        self._combine(source, got, target, how)

    def _combine(self, mine: torch.Tensor, got: Got, target: torch.Tensor, how: Reduction) -> None:
        parts = [mine if rank == self._rank else from_frame(got[rank][0], mine.dtype, mine.numel())
                 for rank in self.members]  # fmt: skip
        out = target if self.size == 2 else torch.empty_like(target)  # in place the third would come too late
        how.reduce(parts, out)
        if out is not target:
            target.copy_(out)

    def _reduce_chunk(self, source: torch.Tensor, target: torch.Tensor, how: Reduction) -> _Chunk:
        pieces, targets = source.tensor_split(self.size), target.tensor_split(self.size)
        of = dict(zip(self.members, pieces, strict=True))
        got = yield self.begin([(rank, of[rank]) for rank in self._others])
        self._combine(of[self._rank], got, targets[self.index], how)
        got = yield self.begin([(-1, targets[self.index])])
        for rank, piece in zip(self.members, targets, strict=True):
            if rank != self._rank:
                piece.copy_(from_frame(got[rank][0], piece.dtype, piece.numel()))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor chunk by chunk."""
        ranges = self._ranges(tensor.numel(), tensor.itemsize)
        self._begin_chunks(self._copy_chunk(tensor[one], root) for one in ranges)()

    def _copy_chunk(self, part: torch.Tensor, root: int) -> _Chunk:
        got = yield self.begin([(-1, part)] if self.index == root else [])
        if self.index != root:
            part.copy_(from_frame(got[self.members[root]][0], part.dtype, part.numel()))

    def allgather(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Copy all ranks' tensors chunk by chunk."""
        places = torch.split(target, list(counts))
        ranges = self._ranges(max(counts), source.itemsize)
        self._begin_chunks(self._gather_chunk(source, places, one) for one in ranges)()

    def _gather_chunk(self, source: torch.Tensor, places: Sequence[torch.Tensor], one: slice) -> _Chunk:
        got = yield self.begin([(-1, source[one])])
        for rank, place in zip(self.members, places, strict=True):
            part = place[one]
            part.copy_(source[one] if rank == self._rank else from_frame(got[rank][0], part.dtype, part.numel()))

    def alltoall(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Send every rank its part."""
        mine = dict(
            zip(self.members, torch.split(source[: sum(counts[self.index])], list(counts[self.index])), strict=True)
        )
        got = self.swap([(rank, mine[rank]) for rank in self._others if mine[rank].numel()])
        received = [row[self.index] for row in counts]
        for rank, place in zip(self.members, torch.split(target[: sum(received)], received), strict=True):
            if place.numel():
                place.copy_(mine[rank] if rank == self._rank else from_frame(got[rank][0], place.dtype, place.numel()))

    def reducescatter(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int], how: Reduction) -> None:
        """Send every rank its part of all tensors; each reduces its own."""
        mine = dict(zip(self.members, torch.split(source, list(counts)), strict=True))
        got = self.swap([(rank, mine[rank]) for rank in self._others])
        self._combine(mine[self._rank], got, target, how)

    def _begin_chunks(self, chunks: Iterable[_Chunk]) -> Callable[[], None]:
        """Begin some chunks; returns a function that carries out all, a few at a time, in one order on all ranks."""
        waiting: deque[tuple[_Chunk, Swap]] = deque()
        rest: Iterator[_Chunk] = iter(chunks)

        def start(count: int) -> None:
            for _, chunk in zip(range(count), rest, strict=False):
                waiting.append((chunk, next(chunk)))

        def end() -> None:
            while waiting:
                chunk, swap = waiting.popleft()
                try:
                    waiting.append((chunk, chunk.send(swap.wait(self.timeout_s))))
                except StopIteration:
                    start(1)

        start(PAIR_WINDOW if self.size == 2 else WINDOW)
        return end

    def _ranges(self, numel: int, itemsize: int) -> Iterator[slice]:
        """Yield the elements of each chunk."""
        most, part = PAIR_CHUNK_BYTES if self.size == 2 else CHUNK_BYTES, -(-numel * itemsize // LEAST_CHUNKS)
        step = min(most, max(LEAST_CHUNK_BYTES, part)) // itemsize
        return (slice(start, min(numel, start + step)) for start in range(0, numel, step))
