"""Whether NCCL can connect ranks: each needs a GPU of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import paceline.hvd as hvd
from paceline.collectives.planes.torch_group import gpus_are_apart, nccl_is_available, own_gpu
from paceline.hvd.errors import HorovodInternalError
from paceline.testing import LocalJob


@pytest.mark.parametrize(
    ("gpus", "apart"), [("abc", True), ("aba", False), (["a", "", "c"], False), (["", "", ""], False)]
)
def test_nccl_connects_ranks_that_have_a_gpu_each(gpus: list[str], apart: bool) -> None:
    store, members = HashStore(), (1, 4, 6)
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda index: gpus_are_apart(store, members[index], members, gpus[index], 20.0), range(3))
        assert list(found) == [apart] * 3


def test_rank_that_does_not_tell_its_gpu_is_named() -> None:
    with pytest.raises(HorovodInternalError, match=r"rank 0: rank 5 did not tell its GPU within 0\.2 s, so ranks 0, 5"):
        gpus_are_apart(HashStore(), 0, (0, 5), "a", 0.2)


@pytest.mark.skipif(nccl_is_available(), reason="needs a machine without NCCL")
def test_machine_without_nccl_has_no_gpu_for_it() -> None:
    assert own_gpu() == ""


def reduce_on_one_gpu() -> list[list[float]]:
    hvd.init()
    mine = torch.full((5,), float(hvd.rank()), device="cuda")
    found = [hvd.allreduce(mine, op=hvd.Sum), hvd.allgather(mine), hvd.broadcast(mine, root_rank=1)]
    hvd.shutdown()
    return [one.tolist() for one in found]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_that_share_a_gpu_meet_in_host_memory() -> None:
    with LocalJob(2, 1) as job:
        assert job.run(reduce_on_one_gpu) == [[[1.0] * 5, [0.0] * 5 + [1.0] * 5, [1.0] * 5]] * 2


def reduce_beside_a_busy_stream() -> list[object]:
    """Reduce while the stream of the script has long work that it began later; then use and drop new results."""
    hvd.init()
    total, ended = torch.ones(1 << 20, device="cuda"), torch.cuda.Event()
    hvd.allreduce_(total, op=hvd.Sum)  # makes what is made once
    handle = hvd.allreduce_async_(total, op=hvd.Sum, name="total")
    torch.cuda._sleep(10_000_000_000)  # some 5 s of the GPU
    ended.record()
    hvd.synchronize(handle)
    is_beside = not ended.query()
    mean = torch.zeros(1 << 20, device="cuda")
    for number in range(20):
        mean += hvd.allreduce(torch.full((1 << 20,), float(number), device="cuda"))
    hvd.shutdown()
    return [is_beside, total.unique().tolist(), mean.unique().tolist()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reduction_on_a_gpu_does_not_wait_for_kernels_that_were_begun_after_it() -> None:
    with LocalJob(2, 1) as job:
        assert job.run(reduce_beside_a_busy_stream) == [[True, [4.0], [190.0]]] * 2


def join_early() -> list[list[float]]:
    """Reduce on this rank's GPU, which is not the current one, three times on rank 0 and once on rank 1."""
    hvd.init()
    device = torch.device("cuda", hvd.rank() % torch.cuda.device_count())
    found = []
    for _ in range(1 if hvd.rank() else 3):
        torch.cuda._sleep(100_000_000)
        found.append(hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum).tolist())
    hvd.join()
    hvd.shutdown()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rank_that_has_joined_gives_zeros_on_its_gpu() -> None:
    with LocalJob(2, 1) as job:
        assert job.run(join_early) == [[[2.0] * 3, [1.0] * 3, [1.0] * 3], [[2.0] * 3]]
