"""Collective operations between hosts: what each rank gives to which server, and the results."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.collectives.planes.base import AVERAGE, SUM, Reduction
from paceline.collectives.planes.servers import MEETINGS, FarPlane, server_of
from paceline.server.meetings import Meetings
from paceline.server.members import Asker
from paceline.wire import messages as m
from paceline.worker.session import Session

SERVERS = 2


class Job:
    """Servers of a job, and the requests of its workers.

    Attributes:
        asked: by rank, server and bytes of each request.
        before: by rank, how many of them it had made when it first waited.
    """

    def __init__(self, ranks: int) -> None:
        self.asked: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(ranks)}
        self.before: dict[int, int] = {}
        self.meetings, self.lock = [Meetings(8) for _ in range(SERVERS)], threading.Lock()

    def planes(self) -> list[FarPlane]:
        """Return the plane of each rank."""
        sessions = [cast(Session, Worker(self, rank)) for rank in self.asked]
        return [FarPlane(one, "g", list(self.asked), 10.0) for one in sessions]


class Worker:
    """The part of a worker's session that a plane needs; also the server's record of who asks."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self.rank, self.servers = job, rank, range(SERVERS)

    def ask_server(
        self, server: int, body: m.Meet, what: str, frames: Sequence[Any], on_answer: Callable[..., None]
    ) -> threading.Event:
        """Come to a meeting. A server has a copy of its own: the caller changes the tensor after its answer."""
        came, rank = threading.Event(), self.rank
        frames = [memoryview(bytes(one)) for one in frames]

        class Coming:
            def __init__(self) -> None:
                self.rank = rank

            def answer(self, answer: m.Met, frames: Callable[[], list[Any]]) -> None:
                on_answer(answer, [memoryview(bytes(one)) for one in frames()])
                came.set()

        with self._job.lock:
            self._job.asked[rank].append((server, sum(memoryview(one).nbytes for one in frames)))
            self._job.meetings[server].meet(cast(Asker, Coming()), body, frames)
        return came

    def wait(self, calls: Iterable[threading.Event], timeout_s: float) -> None:
        """Wait for answers."""
        self._job.before.setdefault(self.rank, len(self._job.asked[self.rank]))
        assert all(one.wait(timeout_s) for one in calls)


def reduced(job: Job, tensors: Sequence[torch.Tensor], op: int) -> None:
    """Reduce in place on all ranks."""
    how = Reduction(op, tensors[0].dtype, len(tensors))
    with ThreadPoolExecutor(len(tensors)) as ranks:
        for one in [ranks.submit(plane.allreduce, x, x, how) for plane, x in zip(job.planes(), tensors, strict=True)]:
            one.result()


@pytest.mark.parametrize("numel", [1, 8_191, 400_001, 3_000_000])
@pytest.mark.parametrize(("ranks", "dtype", "op"), [(2, torch.float32, SUM), (2, torch.bfloat16, AVERAGE),
                                                    (3, torch.float64, SUM), (3, torch.int32, AVERAGE)])  # fmt: skip
def test_all_ranks_get_the_sum_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype, op: int, numel: int) -> None:
    torch.manual_seed(0)
    tensors = [(100 * torch.randn(numel)).to(dtype) for _ in range(ranks)]
    expected = torch.empty_like(tensors[0])
    Reduction(op, dtype, ranks).reduce([one.clone() for one in tensors], expected)
    reduced(Job(ranks), tensors, op)
    assert all(torch.equal(one, expected) for one in tensors)


def test_two_ranks_send_a_tensor_once_and_use_both_directions_of_their_link_from_the_start() -> None:
    job = Job(2)
    reduced(job, [torch.ones(400_000), torch.ones(400_000)], SUM)
    for rank in range(2):
        first = job.asked[rank][: job.before[rank]]
        assert {server for server, _ in first} == {0, 1}, "to the other host's server, and to its own"
        assert sum(size for _, size in first) == 1_600_000
        assert first == job.asked[rank], "one meeting of each chunk"


def test_few_chunks_of_a_large_tensor_are_under_way_at_a_time() -> None:
    job = Job(2)
    reduced(job, [torch.ones(8_000_000), torch.ones(8_000_000)], SUM)
    for rank in range(2):
        assert sum(size for _, size in job.asked[rank][: job.before[rank]]) <= 8 * 2**20
        assert sum(size for _, size in job.asked[rank]) == 32_000_000


def test_tensor_goes_to_the_servers_before_the_one_before_it_is_reduced() -> None:
    """Operations that began in unlike orders meet all the same: their numbers do not depend on that order."""
    job = Job(2)
    how, planes = Reduction(SUM, torch.float32, 2), job.planes()
    tensors = [[torch.full((400_001,), float(10 * rank + one)) for one in (1, 2)] for rank in range(2)]
    ends: list[list[Callable[[], None]]] = []
    for rank, order in enumerate([(0, 1), (1, 0)]):
        ends.append([])
        for one in order:
            plane, tensor = copy.copy(planes[rank]), tensors[rank][one]
            plane.name(f"all_reduce {one}", one + 1, 10.0, False)
            ends[rank].append(plane.begin_allreduce(tensor, tensor, how))
        assert sum(size for _, size in job.asked[rank]) == 2 * 1_600_004, "of both, before either is waited for"
    for end in [*ends[0], *reversed(ends[1])]:
        end()
    for rank in range(2):
        assert [one.unique().tolist() for one in tensors[rank]] == [[12.0], [14.0]]


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 5, 8, 10])
def test_operations_of_one_meeting_take_turns_with_the_servers(servers: int) -> None:
    session: Any = SimpleNamespace(servers=[None] * servers)
    numbers = [number * MEETINGS + 1 for number in range(1, servers + 1)]
    assert {server_of(session, "default", number) for number in numbers} == set(range(servers))
