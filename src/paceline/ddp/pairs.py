"""Send and receive between two ranks of a group: meetings of two at a server.

Ranks start them in any order, so each has a thread of its own. Those of one sender, receiver and tag are numbered, and
match in their order. The request of one that failed may stay at the server, and would take a later message. So later
ones fail, too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.collectives.planes.servers import Swap, server_of
from paceline.ddp.host_copy import HostCopy, copying, ready
from paceline.ddp.objects import may_be_objects
from paceline.ddp.work import Operations, Work
from paceline.layout.tensors import from_frame, to_frame
from paceline.net.base import sealed
from paceline.wire import messages as m
from paceline.worker.session import Session


class Pairs:
    """The sends and receives of a rank."""

    def __init__(self, session: Session, group: str, members: Sequence[int]) -> None:
        self._session, self._group, self._members = session, group, list(members)
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._operations = Operations()

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout_s: float) -> Work:
        """Send a tensor to a rank."""
        is_ready, receiver = ready([tensor]), self._members[dst]
        meet, seals = self._next(self._session.rank, receiver, tag, [receiver]), may_be_objects([tensor])

        def job() -> int:
            is_ready()
            with copying([tensor]):
                host = HostCopy(tensor)
            frame = to_frame(host.flat)
            self._meet(meet, [sealed(frame) if seals else frame], timeout_s)
            return -1

        return self._start(f"send to rank {dst}", job, [])

    def recv(self, tensor: torch.Tensor, src: int, tag: int, timeout_s: float) -> Work:
        """Receive a tensor from a rank."""
        meet = self._next(self._members[src], self._session.rank, tag, [])
        return self._start(
            f"recv from rank {src}", partial(self._take, meet, tensor, ready([tensor]), timeout_s), [tensor]
        )

    def recv_any(self, tensor: torch.Tensor, tag: int, timeout_s: float) -> Work:
        """Receive a tensor from the rank that sends first."""
        box, is_ready = self._box(self._session.rank, tag), ready([tensor])

        def job() -> int:
            rank = self._take(m.TakeAny(box), tensor, is_ready, timeout_s)
            self._numbers[box, self._members[rank]] += 1
            return rank

        return self._start("recv from any rank", job, [tensor])

    def _box(self, receiver: int, tag: int) -> str:
        return f"{self._group}/{tag}>{receiver}"

    def _next(self, sender: int, receiver: int, tag: int, to: list[int]) -> m.Meet:
        """Return the next meeting of a sender and a receiver."""
        box = self._box(receiver, tag)
        self._numbers[box, sender] += 1
        return m.Meet(box, self._numbers[box, sender], [sender, receiver], "send and recv", to)

    def _take(
        self, body: m.Meet | m.TakeAny, tensor: torch.Tensor, is_ready: Callable[[], float], timeout_s: float
    ) -> int:
        """Receive a tensor; returns the rank that has sent it."""
        ((sender, (frame,)),) = self._meet(body, (), timeout_s).items()
        rank, sent = self._members.index(sender), memoryview(frame).nbytes
        if sent != tensor.nbytes:
            raise ValueError(
                f"rank {rank} has sent {sent} bytes, and recv has a tensor of {tensor.nbytes} "
                f"({tensor.numel()} elements of {tensor.dtype}): receive into a tensor with the sender's size and "
                "dtype; where these change, let it send them first"
            )
        is_ready()
        with copying([tensor]):
            host = HostCopy(tensor, reads=False)
            host.flat.copy_(from_frame(frame, host.flat.dtype, host.flat.numel()))
            host.put()
        return rank

    def _meet(self, body: m.Meet | m.TakeAny, frames: Any, timeout_s: float) -> dict[int, list[memoryview]]:
        server = server_of(self._session, body.group)
        return Swap(self._session, server, body, frames, f"send and recv of group {self._group!r}").wait(timeout_s)

    def _start(self, what: str, job: Callable[[], int], result: Sequence[torch.Tensor]) -> Work:
        work = Work(f"{what} of group {self._group!r}", result)
        run = partial(self._operations.carry_out, work, job)
        threading.Thread(target=run, name="paceline-pair", daemon=True).start()
        return work
