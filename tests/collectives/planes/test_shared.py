"""How ranks of one host wait for each other."""

from __future__ import annotations

import os
import random
import resource
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paceline.collectives.planes import shared
from paceline.collectives.planes.base import SUM, Reduction
from paceline.collectives.planes.shared import Neighbours, Offer, SharedPlane, share_memory
from paceline.hvd.errors import HorovodInternalError

AREA_BYTES = 4096
AREA = AREA_BYTES // 4


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """The process has more than 1,024 open files, as with many data loaders; ``select`` takes none above them."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    yield
    for fd in files:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_ranks_that_do_not_come_are_named_however_many_files_are_open(many_open_files: None) -> None:
    offers = [Offer([other for other in range(3) if other != rank], 4096) for rank in range(3)]
    described = {rank: offer.describe() for rank, offer in enumerate(offers) if rank}
    neighbours = Neighbours(0, offers[0], described, timeout_s=0.01)
    with pytest.raises(HorovodInternalError, match=r"rank 1 and rank 2 did not go on with an operation within 0\.01 s"):
        neighbours.wait([1, 2])
    neighbours.close()
    for one in offers[1:]:
        one.close()


def test_nobody_shares_memory_where_a_rank_of_some_host_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []

    def exchange(mine: bytes) -> dict[int, bytes]:
        told.append(mine)
        return {0: mine, 1: b"[]" if len(told) % 2 else b"no", 2: b"yes"}

    assert share_memory(0, [0, 1], True, 1.0, exchange) == (None, False)
    assert share_memory(2, [2], True, 1.0, exchange) == (None, False)
    assert [one for one in told if one == b"yes"] == [b"yes"]
    monkeypatch.setattr(shared, "Offer", lambda others: os.open("/nowhere", os.O_RDONLY))
    assert share_memory(0, [0, 1], True, 1.0, exchange) == (None, False)
    assert told[-2:] == [b"[]", b"no"]


@pytest.fixture
def host() -> Iterator[list[Neighbours]]:
    """Three ranks, all in this process."""
    offers = [Offer([other for other in range(3) if other != rank], AREA_BYTES) for rank in range(3)]
    described = [offer.describe() for offer in offers]
    found = [
        Neighbours(rank, offers[rank], {one: described[one] for one in range(3) if one != rank}, timeout_s=20.0)
        for rank in range(3)
    ]
    yield found
    for one in found:
        one.close()


def _reduced(plane: SharedPlane, tensor: torch.Tensor) -> torch.Tensor:
    plane.allreduce(tensor, tensor, Reduction(SUM, tensor.dtype, plane.size))
    return tensor


def test_a_rank_shows_the_next_chunk_before_it_waits_for_this_one(host: list[Neighbours]) -> None:
    planes = [SharedPlane(host[rank], [0, 1], True) for rank in range(2)]
    tensors = [torch.arange(3.0 * AREA) + rank for rank in range(2)]
    reader, marks, poll = host[1]._offer.readers[0], [], select.poll()
    poll.register(reader, select.POLLIN)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(_reduced, planes[0], tensors[0])
        while len(marks) < 2:
            assert poll.poll(20_000), f"rank 0 has shown {len(marks)} chunks, and waits for rank 1"
            marks.append(os.read(reader, 64))
        assert not first.done()
        for one in marks:  # for rank 1
            os.write(host[0]._writers[1], one)
        second = _reduced(planes[1], tensors[1])
        assert torch.equal(first.result(60), second)
    assert torch.equal(second, 2 * torch.arange(3.0 * AREA) + 1)


def test_planes_of_all_ranks_of_a_host_write_to_no_area_that_another_one_may_still_read(
    host: list[Neighbours],
) -> None:
    """Process sets that differ on another host only have planes of their own here."""
    with ThreadPoolExecutor(3) as ranks:
        for number in range(1, 5):
            planes = [SharedPlane(one, [0, 1, 2], False) for one in host]
            tensors = [torch.full((AREA,), float(number)) for _ in planes]
            assert all(found.unique().tolist() == [3.0 * number] for found in ranks.map(_reduced, planes, tensors))
    areas = host[0].areas[0].view(torch.float32)[: 4 * AREA].view(4, AREA)
    assert areas.unique(dim=1).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("members", "shares_areas"), [((0, 1, 2), False), ((0, 1), True)])
def test_chunks_of_many_operations_arrive_whole(
    host: list[Neighbours], members: tuple[int, ...], shares_areas: bool
) -> None:
    """Operations of all kinds, one after the other, at whatever pace the threads have."""
    size = len(members)

    def work(rank: int) -> None:
        plane = SharedPlane(host[rank], members, shares_areas)
        same = random.Random(1)
        for _ in range(150):
            counts = [same.randrange(3 * AREA) for _ in members]
            bits = [
                torch.randint(1000, (count,), generator=torch.Generator().manual_seed(place)).float()
                for place, count in enumerate(counts)
            ]
            numel, root, total = sum(counts), same.randrange(size), torch.arange(float(sum(counts)))
            match same.randrange(4):
                case 0:
                    expected = size * total + sum(range(size))
                    assert torch.equal(_reduced(plane, total + plane.index), expected)
                case 1:
                    tensor = bits[root] if plane.index == root else torch.zeros(counts[root])
                    plane.broadcast(tensor, root)
                    assert torch.equal(tensor, bits[root])
                case 2:
                    target = torch.empty(numel)
                    plane.allgather(bits[plane.index], target, counts)
                    assert torch.equal(target, torch.cat(bits))
                case 3:
                    target = torch.empty(counts[plane.index])
                    plane.reducescatter(total, target, counts, Reduction(SUM, total.dtype, size))
                    assert torch.equal(target, size * total.split(counts)[plane.index])

    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(work, members))
