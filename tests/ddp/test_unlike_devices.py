"""Ranks whose devices have unlike types train one model, with equal weights.

The other type of device is built from ``other_device/memory.cpp``, which takes about 7 s of a core. Where there is a
GPU, it takes part too.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import backend_registration

import paceline
import paceline.hvd as hvd
from paceline.testing import LocalJob
from tests.ddp.test_backend import open_group

_TORCH = Path(torch.__file__).parent


def other_device(library: str) -> torch.device:
    """Register the device type, with PyTorch's stand-ins for what its library does not have."""
    torch.utils.rename_privateuse1_backend("other")
    torch.ops.load_library(library)
    torch._register_device_module("other", backend_registration._DummyBackendModule())
    torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    return torch.device("other:0")


def trained(device: torch.device, group: Any, **options: Any) -> list[list[float]]:
    """Train with DDP on a device; returns weights and running means."""
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model = DistributedDataParallel(net.to(device), process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return [one.detach().cpu().flatten().tolist() for one in model.parameters()]


def train(library: str) -> dict[str, Any]:
    """Train with a rank on a CPU, and one on a device whose type is in a library; without one, on a GPU."""
    open_group()
    device = torch.device("cpu")
    if dist.get_rank():
        device = other_device(library) if library else torch.device("cuda:0")
    total = torch.full((3,), 1.0 + dist.get_rank(), device=device)
    dist.all_reduce(total)
    parts = [torch.zeros(2, device=device) for _ in range(2)]
    dist.all_gather(parts, torch.ones(2, device=device))
    return {
        "device": total.device.type,
        "sums": [total.tolist(), *[one.tolist() for one in parts]],
        "unlike": trained(device, None),
        "views": trained(device, None, gradient_as_bucket_view=True, bucket_cap_mb=0.0005),
        "alike": trained(torch.device("cpu"), None),
    }


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build a device type with")
    found = tmp_path_factory.mktemp("device") / "memory.so"
    source = Path(__file__).parent / "other_device" / "memory.cpp"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{_TORCH}/include", str(source), f"-L{_TORCH}/lib",
               "-lc10", "-ltorch_cpu", "-o", str(found)]  # fmt: skip
    subprocess.run(command, check=True, timeout=170)
    return found


def test_ranks_on_unlike_devices_train_as_on_devices_of_one_type(library: Path) -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        first, second = job.run(train, str(library))
    assert [first.pop("device"), second.pop("device")] == ["cpu", "other"]
    assert first == second
    assert first["sums"] == [[3.0] * 3, [1.0] * 2, [1.0] * 2]
    assert first["unlike"] == first["views"] == first["alike"]


def reduce(library: str) -> dict[str, Any]:
    """Reduce by the Horovod interface, and train by its store, on a CPU and on a device whose type is in a library."""
    hvd.init()
    rank = hvd.rank()
    device = other_device(library) if rank else torch.device("cpu")
    mine = torch.arange(6.0, device=device) + rank
    found = [hvd.allreduce(torch.ones(2), op=hvd.Sum), hvd.allreduce(mine, op=hvd.Sum), hvd.allgather(mine[:2])]
    found += [hvd.broadcast(mine, 1), hvd.alltoall(mine), hvd.reducescatter(mine, op=hvd.Sum), mine]
    found += hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Max)
    found += [hvd.allreduce(mine, op=hvd.Sum, name="of the last one")] if rank else []
    hvd.join()
    return {
        "devices": [one.device.type for one in found],
        "found": [one.tolist() for one in found],
        "unlike": trained_by_store(device),
        "alike": trained_by_store(torch.device("cpu")),
    }


def trained_by_store(device: torch.device) -> list[list[float]]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).to(device)
    store = paceline.kvstore.create("allreduce")
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.DistributedOptimizer(sgd, kvstore=store, model=net)
    generator = torch.Generator().manual_seed(store.rank)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(8, 6, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return [one.detach().cpu().flatten().tolist() for one in net.parameters()]


@pytest.mark.parametrize("memory", [True, False])
def test_ranks_on_unlike_devices_reduce_in_host_memory(library: Path, memory: bool) -> None:
    with LocalJob(num_workers=2, num_servers=1, shared_memory=memory) as job:
        first, second = job.run(reduce, str(library))
    assert set(first["devices"][1:]) == {"cpu"}
    assert set(second["devices"][1:]) == {"other"}
    total, mine = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    alike = [[2.0, 2.0], total, [0.0, 1.0, 1.0, 2.0], mine]
    largest = [mine, [1.0]]
    assert first["found"] == [*alike, [0.0, 1.0, 2.0, 1.0, 2.0, 3.0], total[:3], [0.0, *mine[:5]], *largest]
    assert second["found"] == [*alike, [3.0, 4.0, 5.0, 4.0, 5.0, 6.0], total[3:], mine, *largest, mine]
    assert first["unlike"] == second["unlike"] == first["alike"] == second["alike"]


# ---- a GPU, which two ranks may share ------------------------------------------------------------------------------

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("memory", [pytest.param(one, marks=on_a_gpu) for one in (True, False)])
def test_ranks_on_a_cpu_and_a_gpu_train_as_on_cpus(memory: bool) -> None:
    with LocalJob(num_workers=2, num_servers=1, shared_memory=memory) as job:
        first, second = job.run(train, "")
    assert [first.pop("device"), second.pop("device")] == ["cpu", "cuda"]
    assert first["sums"] == second["sums"] == [[3.0] * 3, [1.0] * 2, [1.0] * 2]
    for one in (first, second):
        for name in ("unlike", "views"):
            for ours, expected in zip(one[name], first["alike"], strict=True):
                torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def reduce_late() -> list[Any]:
    """Reduce what a stream has yet to compute, and compute with the result at once."""
    open_group("nccl")
    rank, found = dist.get_rank(), []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in range(1, 4):
            torch.cuda._sleep(50_000_000)  # some 30 ms of the GPU
            total = torch.full((1 << 20,), float(step + rank), device="cuda")
            work = dist.all_reduce(total, async_op=True)
            work.wait()
            found.append((total * 2).unique().tolist())
        future = dist.all_reduce(total, async_op=True).get_future()
        found.append(future.then(lambda done: done.value()[0] + 1).wait().unique().tolist())
    return found


@pytest.mark.parametrize("memory", [pytest.param(one, marks=on_a_gpu) for one in (True, False)])
def test_what_a_stream_computes_late_is_reduced(memory: bool) -> None:
    with LocalJob(num_workers=2, num_servers=1, shared_memory=memory) as job:
        assert job.run(reduce_late) == [[[6.0], [10.0], [14.0], [15.0]]] * 2


def reduce_beside() -> list[Any]:
    """Reduce while the stream of the script has long work that it began later."""
    open_group("nccl")
    total, ended = torch.ones(1 << 20, device="cuda"), torch.cuda.Event()
    dist.all_reduce(total)  # makes what is made once
    work = dist.all_reduce(total, async_op=True)
    torch.cuda._sleep(10_000_000_000)  # some 5 s of the GPU
    ended.record()
    work.wait()
    is_beside = not ended.query()
    return [is_beside, total.unique().tolist()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reduction_does_not_wait_for_kernels_that_were_begun_after_it() -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        assert job.run(reduce_beside) == [[True, [4.0]]] * 2


def normalised_over(ranks: int, rank: int) -> list[list[float]]:
    torch.manual_seed(0)
    net: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    net.to("cuda")
    batches = torch.randn(4, 16, 6, generator=torch.Generator().manual_seed(1)).to("cuda")
    trained = net
    if ranks > 1:
        net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
        trained = DistributedDataParallel(net, device_ids=[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        trained(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
    return [one.detach().double().flatten().tolist() for one in net.state_dict().values()]


def normalised() -> list[list[list[float]]]:
    rank = open_group("nccl")
    return [normalised_over(2, rank), normalised_over(1, 0)]


@pytest.mark.parametrize("memory", [pytest.param(one, marks=on_a_gpu) for one in (True, False)])
def test_batches_are_normalised_over_all_ranks_as_in_one_process(memory: bool) -> None:
    with LocalJob(num_workers=2, num_servers=1, shared_memory=memory) as job:
        for ours, alone in job.run(normalised):
            for mine, expected in zip(ours, alone, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected), rtol=1e-4, atol=1e-5)
