"""PyTorch's own tools around process groups, in a script of ``paceline launch --ddp``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed import nn as dnn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from paceline.net import lifeline
from paceline.testing import LocalJob
from tests.clusters.fork_server import jobs_have
from tests.ddp.test_backend import open_group


@pytest.fixture(autouse=True, scope="module")
def jobs_have_the_tools() -> Iterator[None]:
    with jobs_have(
        "tests.ddp.test_torch_tools", "torch.distributed.checkpoint.state_dict", "torch._functorch.aot_autograd"
    ):
        yield


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    return DistributedDataParallel(net, **options)


def trained(model: Any, optimizer: Any, steps: int = 5) -> bool:
    """Train; returns whether all ranks have the same weights, which are no others than before."""
    before = [one.detach().clone() for one in model.parameters()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return not torch.equal(before[0], next(model.parameters())) and are_same(model)


def are_same(model: Any) -> bool:
    mine = torch.cat([one.detach().flatten() for one in model.parameters()])
    found = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(found, mine)
    return torch.equal(*found)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_hook(hook: Any, state: Any = None) -> bool:
    model = wrapped(bucket_cap_mb=0.0005)
    model.register_comm_hook(state, hook)
    return trained(model, sgd(model))


def power(is_batched: bool) -> bool:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    return with_hook(powerSGD_hook.batched_powerSGD_hook if is_batched else powerSGD_hook.powerSGD_hook, state)


def zero(**options: Any) -> bool:
    model = wrapped()
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, **options))


def joined() -> bool:
    model = wrapped()
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
    return are_same(model)


def local_sgd() -> bool:
    model = wrapped()
    group, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, group, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    return trained(model, PostLocalSGDOptimizer(sgd(model), averager), 5)


def compiled() -> bool:
    model = torch.compile(wrapped(), backend="eager")
    return trained(model, sgd(model))


def mesh() -> bool:
    made = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = wrapped(device_mesh=made)
    return trained(model, sgd(model))


def differentiable() -> list[float]:
    one = torch.ones(1, requires_grad=True)
    total = dnn.all_reduce(one * (dist.get_rank() + 1))  # type: ignore[no-untyped-call]
    parts = dnn.all_to_all([torch.zeros(1), torch.zeros(1)], [one, one])  # type: ignore[no-untyped-call]
    (total + parts[0].sum() + parts[1].sum()).sum().backward()
    assert one.grad is not None
    return [total.item(), one.grad.item() - 2 * dist.get_rank()]


def objects() -> list[Any]:
    rank = dist.get_rank()
    gathered: list[Any] = [None, None]
    dist.gather_object({"rank": rank}, gathered if rank == 0 else None)
    dist.broadcast_object_list(gathered)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None)
    if rank == 0:
        dist.send_object_list(["c"], 1)
        sent = ["c"]
    else:
        sent = [None]  # type: ignore[list-item]
        dist.recv_object_list(sent, 0)
    return [*gathered, scattered[0] == "ab"[rank], *sent]


def batched_pairs() -> float:
    other, got = 1 - dist.get_rank(), torch.zeros(3)
    operations = [dist.P2POp(dist.isend, torch.ones(3) * other, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got.sum().item() - 3 * dist.get_rank()


def coalesced() -> list[float]:
    one, other = torch.ones(1), torch.ones(2)
    with c10d._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(other)
    return [*one.tolist(), *other.tolist()]


def nested_future() -> list[list[float]]:
    outputs = [torch.zeros(1), torch.zeros(1)]
    work = dist.all_gather(outputs, torch.ones(1) * dist.get_rank(), async_op=True)
    (found,) = work.get_future().wait()
    return [one.tolist() for one in found]


def sparse_mean() -> list[float]:
    tensor = torch.sparse_coo_tensor([[0, dist.get_rank() + 1]], [2.0, 4.0], (3,))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    found: list[float] = tensor.to_dense().tolist()
    return found


def dealt() -> int:
    sampler: DistributedSampler[int] = DistributedSampler(range(11))  # type: ignore[arg-type]
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, list(sampler))
    return len({*parts[0], *parts[1]})


def barriers() -> bool:
    dist.barrier(device_ids=[0])
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    return True


def refused() -> list[str]:
    with pytest.raises(RuntimeError, match="split"):
        dist.split_group(split_ranks=[[0], [1]])
    found = []
    for tensor, op in (
        (torch.ones(2).to(torch.uint16), dist.ReduceOp.SUM),
        (torch.ones(2).to(torch.float8_e4m3fn), dist.ReduceOp.MAX),
        (torch.ones(2), dist._make_nccl_premul_sum(2.0)),
    ):
        with pytest.raises(ValueError, match=r"cast|scale") as caught:
            dist.all_reduce(tensor, op)
        found.append(str(caught.value))
    return found


def summed() -> dict[str, list[Any]]:
    ones = {one: torch.ones(2).to(one) for one in (torch.bool, torch.int16, torch.complex64, torch.bfloat16)}
    for one in ones.values():
        dist.all_reduce(one)
    return {str(name): [str(element) for element in one.tolist()] for name, one in ones.items()}


SAME: dict[str, Callable[[], bool]] = {
    "ZeRO": zero,
    "ZeRO with views": lambda: zero(parameters_as_bucket_view=True),
    "joined": joined,
    "local SGD": local_sgd,
    "half floats": lambda: with_hook(default_hooks.fp16_compress_hook),
    "PowerSGD": lambda: power(False),
    "quantized": lambda: with_hook(quantization_hooks.quantization_pertensor_hook, dist.group.WORLD),
    "mesh": mesh,
    "compiled": compiled,
    "barriers": barriers,
}
FOUND: dict[str, Callable[[], Any]] = {
    "differentiable": differentiable,
    "objects": objects,
    "pairs": batched_pairs,
    "coalesced": coalesced,
    "nested future": nested_future,
    "sparse mean": sparse_mean,
    "sampler": dealt,
    "sums": summed,
    "refused": refused,
}


def use_tools() -> dict[str, Any]:
    open_group()
    found: dict[str, Any] = {name: case() for name, case in (SAME | FOUND).items()}
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.destroy_process_group()
    open_group()
    model = wrapped()
    return found | {"again, with PyTorch's checks": trained(model, sgd(model))}


def test_tools_of_torch_work_as_they_do_over_its_own_backends() -> None:
    # PowerSGD waits for a GPU's work where the machine has one, whatever the tensors are on.
    with LocalJob(num_workers=2, num_servers=1, environment={"CUDA_VISIBLE_DEVICES": ""}) as job:
        for found in job.run(use_tools):
            texts = found.pop("refused")
            assert found == {
                **dict.fromkeys(SAME, True),
                "differentiable": [3.0, 4.0],
                "objects": [{"rank": 0}, {"rank": 1}, True, "c"],
                "pairs": 0.0,
                "coalesced": [2.0, 2.0, 2.0],
                "nested future": [[0.0], [1.0]],
                "sparse mean": [2.0, 2.0, 2.0],
                "sampler": 11,
                "sums": {
                    "torch.bool": ["True", "True"],
                    "torch.int16": ["2", "2"],
                    "torch.complex64": ["(2+0j)", "(2+0j)"],
                    "torch.bfloat16": ["2.0", "2.0"],
                },
                "again, with PyTorch's checks": True,
            }
            assert "PyTorch cannot compute RedOpType.SUM of torch.uint16 on CPUs" in texts[0]
            assert "torch.float8_e4m3fn" in texts[1]
            assert "scale the tensor, and use SUM" in texts[2]


def chained(hosts: str) -> list[float]:
    """Reduce in callbacks, as PowerSGD does: on rank 0 the operation is over when they are added, on others not."""
    rank = int(os.environ["PACELINE_RANK"])
    lifeline.host_id = lambda: hosts[rank]
    open_group(timeout=timedelta(seconds=60))
    store = c10d._get_default_store()
    if rank == 0:
        store.wait(["others have called"])
    future = dist.all_reduce(torch.ones(100), async_op=True).get_future()
    if rank == 0:
        future.wait()
    found = [torch.ones(number) for number in (10, 20, 30)]

    def reduce(tensor: torch.Tensor) -> Callable[[Any], object]:
        return lambda done: dist.all_reduce(tensor, async_op=True).get_future().wait()

    last = future.then(reduce(found[0])).then(reduce(found[1]))
    other = dist.all_reduce(found[2], async_op=True)
    if rank == len(hosts) - 1:
        store.set("others have called", "")
    last.wait()
    other.wait()
    return [one.unique().item() for one in found]


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_callbacks_of_an_operation_reduce_next_on_all_ranks_wherever_they_run(hosts: str) -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        assert job.run(chained, hosts) == [[2.0] * 3] * 2


def overlapped() -> list[list[int]]:
    """Train between hosts; returns how many reductions there were, and how many began before those before were over."""
    rank = int(os.environ["PACELINE_RANK"])
    lifeline.host_id = lambda: "ab"[rank]
    open_group()
    from paceline.collectives.planes.hosts import GroupPlanes
    from paceline.ddp.group import PacelineGroup

    found, counts = [], [0, 0]

    def counting(place: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[place] += 1
            return original(*args, **kwargs)

        return call

    PacelineGroup.allreduce = counting(0, PacelineGroup.allreduce)  # type: ignore[method-assign]
    GroupPlanes.early = counting(1, GroupPlanes.early)  # type: ignore[method-assign]
    for hook in (None, default_hooks.fp16_compress_hook):
        model = wrapped(bucket_cap_mb=0.0001)
        if hook is not None:
            model.register_comm_hook(None, hook)
        counts[:] = [0, 0]
        for _ in range(3):
            model(torch.randn(8, 6)).square().mean().backward()
        found.append(list(counts))
    return found


def test_all_buckets_of_ddp_between_hosts_begin_early() -> None:
    with LocalJob(num_workers=2, num_servers=1, environment={"CUDA_VISIBLE_DEVICES": ""}) as job:
        for found in job.run(overlapped):
            assert all(reductions == early >= 7 for reductions, early in found), found


def saved(folder: str) -> list[bool]:
    """Save beside the script and load, and give all ranks the weights of rank 0."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    rank = open_group()
    model = wrapped()
    before = [one.detach().clone() for one in model.parameters()]
    checkpoint.async_save(get_model_state_dict(model), checkpoint_id=folder, process_group=dist.new_group()).result()
    with torch.no_grad():
        next(model.parameters()).add_(1 + rank)
    checkpoint.load(get_model_state_dict(model), checkpoint_id=folder)
    found = [all(map(torch.equal, before, model.parameters()))]
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if rank else get_model_state_dict(model), options=options)
    found.append(are_same(model))
    return [*found, dist.distributed_c10d._get_pg_default_device().type == "cpu"]


def test_checkpoints_of_torch(tmp_path: Path) -> None:
    with LocalJob(num_workers=2, num_servers=1, environment={"CUDA_VISIBLE_DEVICES": ""}) as job:
        assert job.run(saved, str(tmp_path)) == [[True, True, True]] * 2
