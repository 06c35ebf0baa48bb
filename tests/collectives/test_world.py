"""``init`` and ``shutdown``, process sets, join, objects."""

from __future__ import annotations

import importlib
import pickle
import socket
import time
from typing import Any, TypeAlias

import pytest
import torch

import paceline.hvd as hvd
from paceline import kvstore
from paceline.collectives import world
from paceline.collectives.coordinator import Coordinator
from paceline.net.security import new_job_key
from paceline.testing import LocalJob
from tests.collectives.test_errors import error_of
from tests.hvd.ranks import run, run_in_turn

T = torch.ones
Found: TypeAlias = dict[str, list[Any]]


@pytest.fixture(scope="module")
def two() -> Found:
    """Results of two ranks, by function."""
    pytest.importorskip("cloudpickle")
    return run_in_turn(2, places, objects, parameters)


@pytest.fixture(scope="module", params=["1", "0"], ids=["shared memory", "Gloo"])
def three(request: pytest.FixtureRequest) -> Found:
    """Results of three ranks, by function."""
    environment = {"PACELINE_SHARED_MEMORY": request.param}
    return run_in_turn(3, process_sets, dynamic_sets, uneven, environment=environment)


def again_and_again() -> float:
    hvd.init()
    times = []
    for number in range(100):
        hvd.shutdown()
        assert not hvd.is_initialized()
        start = time.perf_counter()
        hvd.init()
        times.append(time.perf_counter() - start)
        assert hvd.allreduce(T(3), name="x", op=hvd.Sum)[0].item() == hvd.size(), number
    return sorted(times)[50]


def test_a_hundred_times_init() -> None:
    assert max(run(again_and_again, 2)) < 0.05


def places() -> list[int]:
    hvd.init()
    hvd.init()
    found = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    total = hvd.allreduce(torch.full((1000,), float(hvd.rank())), op=hvd.Sum, name="x")
    assert total.tolist() == [float(sum(range(hvd.size())))] * 1000
    assert hvd.allgather(torch.tensor([hvd.rank()]), name="g").tolist() == list(range(hvd.size()))
    half = hvd.allreduce(torch.full((5,), 1.0 + hvd.rank(), dtype=torch.bfloat16), name="h")
    assert half[0].item() == (hvd.size() + 1) / 2
    return found


def test_ranks_of_one_host(two: Found) -> None:
    assert two["places"] == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]


def two_hosts() -> dict[str, str]:
    """Return the variables of all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {"PACELINE_JOB_KEY": new_job_key(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("hierarchical", ["0", "1"])
def test_ranks_of_two_hosts(hierarchical: str) -> None:
    """Two names of hosts: ranks of one share memory, ranks of different ones talk by Gloo."""
    environment = two_hosts() | {"HOROVOD_HIERARCHICAL_ALLREDUCE": hierarchical}

    def by_rank(rank: int) -> dict[str, str]:
        return {"LOCAL_WORLD_SIZE": "2" if rank < 2 else "1", "HOROVOD_HOSTNAME": "a" if rank < 2 else "b"}

    found = run(places, 3, environment=environment, by_rank=by_rank)
    assert found == [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]]


def total() -> list[float]:
    hvd.init()
    return hvd.allreduce(torch.full((2,), 1.0 + hvd.rank()), op=hvd.Sum).tolist()


def test_two_hosts_of_which_one_shares_no_memory() -> None:
    def by_rank(rank: int) -> dict[str, str]:
        host, shares = ("a", "1") if rank < 2 else ("b", "0")
        return {"LOCAL_WORLD_SIZE": "2", "HOROVOD_HOSTNAME": host, "PACELINE_SHARED_MEMORY": shares}

    assert run(total, 4, environment=two_hosts(), by_rank=by_rank) == [[10.0, 10.0]] * 4


def some_ranks() -> list[Any]:
    if hvd.ProcessSet([0]).size() is not None:
        return ["size before init"]
    import os

    if os.environ["RANK"] == "1":
        return [error_of(lambda: hvd.init(comm=[0, 2]))]
    hvd.init(comm=[0, 2])
    return [hvd.rank(), hvd.size(), hvd.allgather(torch.tensor([hvd.rank()])).tolist()]


def test_init_of_some_ranks() -> None:
    first, second, third = run(some_ranks, 3)
    assert first == [0, 2, [0, 1]]
    assert third == [1, 2, [0, 1]]
    assert "only those ranks may call init" in second[0]


def process_sets() -> list[Any]:
    even, low = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 0])
    hvd.init(process_sets=[even, low])
    rank = hvd.rank()
    found: list[Any] = [low.ranks, low.rank(), low.included(), low.size(), low.process_set_id]
    for number in range(5):
        handles = []
        for one in (even, low, hvd.global_process_set):
            if one.included():
                x = torch.full((200_000,), float(rank + number))
                handles.append(hvd.allreduce_async(x, name="x", op=hvd.Sum, process_set=one))
        if number == 0:
            found.append([hvd.synchronize(handle)[-1].item() for handle in handles])
        else:
            for handle in handles:
                hvd.synchronize(handle)
    if even.included():
        found.append(hvd.broadcast(torch.tensor([rank]), 2, process_set=even).item())
        found.append(hvd.broadcast_object(rank, 2, process_set=even))
        param = torch.nn.Parameter(torch.ones(1))
        inner = torch.optim.SGD([param], 0.1)
        copied = pickle.loads(pickle.dumps(hvd.DistributedOptimizer(inner, process_set=even)))
        assert copied._hvd.choices.process_set is even
    else:
        found.append(error_of(lambda: hvd.allreduce(T(1), process_set=even)))
        found.append(error_of(lambda: hvd.add_process_set([0])))
    hvd.barrier()
    return found


def test_overlapping_process_sets(three: Found) -> None:
    first, second, third = three["process_sets"]
    assert first == [[0, 1], 0, True, 2, 2, [2.0, 1.0, 3.0], 2, 2]
    assert second[:6] == [[0, 1], 1, True, 2, 2, [1.0, 3.0]]
    assert second[6].startswith("ValueError: rank 1 is not in")
    assert "HOROVOD_DYNAMIC_PROCESS_SETS" in second[7]
    assert third == [[0, 1], -1, False, 2, 2, [2.0, 3.0], 2, 2]


def dynamic_sets() -> list[Any]:
    hvd.init(process_sets="dynamic")
    one = hvd.add_process_set([0, 1])
    found: list[Any] = [one.process_set_id, error_of(lambda: hvd.add_process_set([1, 0]))]
    if one.included():
        found.append(hvd.allreduce(T(2), op=hvd.Sum, process_set=one, name="x")[0].item())
    found += [hvd.remove_process_set(one), hvd.remove_process_set(one), one.process_set_id]
    found.append(hvd.remove_process_set(hvd.global_process_set))
    found.append(hvd.add_process_set(hvd.ProcessSet([1])).process_set_id)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    found.append(hvd.add_process_set([0, 1]).process_set_id)
    return found


def test_process_sets_that_change(three: Found) -> None:
    found = three["dynamic_sets"]
    assert found[0][0] == 1
    assert "exists already" in found[0][1]
    assert found[0][2:] == [2.0, True, False, None, False, 2, 1]
    assert found[2][2:] == [True, False, None, False, 2, 1]


def uneven() -> list[Any]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    sums = [hvd.allreduce(T(4), op=hvd.Sum, name="x")[0].item() for _ in range(3 + rank)]
    means = hvd.allreduce(T(4), name="mean")[0].item() if rank == size - 1 else None
    rows = len(hvd.allgather(T(rank + 1, 2), name="rows")) if rank == size - 1 else None
    value = hvd.broadcast(torch.tensor([7]), rank, name="b").item() if rank == size - 1 else None
    parts = hvd.alltoall(torch.arange(size), name="a").tolist() if rank == size - 1 else None
    last = hvd.join()
    return [sums, means, rows, value, parts, last, hvd.allreduce(T(4), op=hvd.Sum, name="x")[0].item()]


def test_join_with_uneven_data(three: Found) -> None:
    first, second, third = three["uneven"]
    assert first == [[3.0, 3.0, 3.0], None, None, None, None, 2, 3.0]
    assert second[0] == [3.0, 3.0, 3.0, 2.0]
    assert third == [[3.0, 3.0, 3.0, 2.0, 1.0], pytest.approx(1 / 3), 3, 7, [2], 2, 3.0]


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value


def objects() -> list[Any]:
    hvd.init()
    rank = hvd.rank()
    local = hvd.broadcast_object(lambda x: x + 40, root_rank=1) if rank else hvd.broadcast_object(None, root_rank=1)
    large = hvd.broadcast_object(bytes(3_000_000) if rank == 0 else None)
    return [local(2), len(large), hvd.allgather_object({"rank": rank})]


def test_objects(two: Found) -> None:
    assert two["objects"] == [[42, 3_000_000, [{"rank": 0}, {"rank": 1}]]] * 2


def parameters() -> list[Any]:
    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + rank)
    if rank == 0:
        model(T(4, 3) * torch.arange(4.0).view(4, 1)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state_dict()
    return [
        [tensor.sum().item() for tensor in model.state_dict().values()],
        [[value.sum().item() for value in one.values()] for one in state["state"].values()],
        state["param_groups"][0]["lr"],
        error_of(lambda: hvd.broadcast_parameters(3, 0)),
        error_of(lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)),
    ]


def test_parameters_and_optimizer_state_come_from_the_root(two: Found) -> None:
    first, second = two["parameters"]
    assert first == second
    assert first[2] == 0.1
    assert len(first[1]) == 4
    assert first[3].startswith("ValueError: invalid params")
    assert first[4] == "ValueError: cannot broadcast torch.optim.LBFGS state"


#: What scripts import from ``horovod.torch.mpi_ops``.
MPI_OPS = """allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_
grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather
grouped_allgather_async broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async reducescatter
reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown
is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank is_homogeneous
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product Compression
HorovodInternalError"""


def end_without_shutdown() -> None:
    """Tell at exit whether the coordinator's sockets are still open when it is closed."""
    store = kvstore.create("allreduce")
    assert store.pushpull("w", T(1), out=T(1)) is None
    link = world.current().base.link
    if isinstance(link, Coordinator):
        close, listener = link.close, link._listener

        def closing(*args: Any) -> None:
            print("coordinator closes, its sockets are", "closed" if listener._closed else "open", flush=True)
            close(*args)

        link.close = closing  # type: ignore[method-assign]


def test_coordinator_ends_before_the_sockets_of_a_job_with_servers_are_closed() -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        job.run(end_without_shutdown)
        assert [worker.wait(30) for worker in job.workers] == [0, 0]
        assert job.report().count("coordinator closes, its sockets are open") == 1
        assert "Traceback" not in job.report()


def test_mpi_ops_has_the_names_of_horovod() -> None:
    module = importlib.import_module("paceline.hvd.mpi_ops")
    assert hvd.mpi_ops is module
    assert sorted(module.__all__) == sorted(MPI_OPS.split())
    assert all(getattr(module, name) is getattr(hvd, name) for name in MPI_OPS.split())


def test_elastic_jobs_are_refused_with_a_way_out() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'elastic'.* --max-restarts"):
        hvd.elastic  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(hvd, "elastic")
