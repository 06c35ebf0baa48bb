"""``paceline launch --ddp``: what a script opens, and what it is told when ranks are missing or unlike."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from paceline.ddp import backend
from paceline.errors import PacelineError, ProtocolError
from paceline.testing import LocalJob
from paceline.worker.current import current_session


def open_group(name: str | None = None, **options: Any) -> int:
    """Open the default group as a script of ``paceline launch --ddp``; returns the rank."""
    os.environ |= {"RANK": os.environ["PACELINE_RANK"], "WORLD_SIZE": os.environ["PACELINE_NUM_WORKERS"]}
    backend.register()
    backend.replace_init()
    dist.init_process_group(name, **options)
    return dist.get_rank()


def script(name: str = "nccl") -> list[Any]:
    open_group(name, init_method="env://", timeout=timedelta(seconds=30))
    pair = dist.new_group([0, 1], backend="gloo")
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.all_reduce(total, group=pair)
    dist.monitored_barrier()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {dist.get_rank()}", "here")
    store.wait([f"rank {one}" for one in range(2)])
    found = [store.get("rank 0").decode(), store.add("count", 2) > 0, store.compare_set("new", "", "x").decode()]
    mine = f"of rank {dist.get_rank()}"
    store.set(mine, "")
    found += [store.num_keys() > 0, store.delete_key(mine), store.delete_key(mine), store.clone().check([mine])]
    backends = [dist.get_backend(), dist.get_backend(pair)]
    dist.destroy_process_group()
    open_group(name)
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    dist.destroy_process_group()
    return [total.tolist(), *backends, *found]


def in_turn() -> dict[str, Any]:
    """Return the results of functions, each of which opens the group anew."""
    found = {}
    for function in (script, unlike_operations, rank_that_goes_on_after_an_error, row_of_nowhere, meaningless,
                     receives_another_size, shard, capabilities):  # fmt: skip
        found[function.__name__] = function()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["shared memory", "server"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results of two ranks, by function."""
    with LocalJob(num_workers=2, num_servers=1, shared_memory=request.param) as job:
        return job.run(in_turn)


def test_script_that_asks_for_another_backend_opens_ours(found: list[dict[str, Any]]) -> None:
    wanted = [[4.0] * 3, "paceline", "paceline", "here", True, "x", True, True, False, False]
    assert [one["script"] for one in found] == [wanted, wanted]


def groups_of_other_members() -> list[float]:
    """Groups that are made anew have the names of those before."""
    found = []
    for members in ([0, 1], [0, 2], [0, 1, 2]):
        rank, total = open_group(), torch.ones(1)
        group = dist.new_group(members, timeout=timedelta(seconds=20))
        if rank in members:
            dist.all_reduce(total, group=group)
        found.append(total.item())
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_groups_that_are_made_anew_may_have_other_members() -> None:
    with LocalJob(num_workers=3, num_servers=1) as job:
        assert job.run(groups_of_other_members) == [[2.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [(None, True), ("nccl", True), ("GLOO", True), ("cpu:gloo,cuda:nccl", True), ("fake", False), ("cpu:fake", False)],
)
def test_backends_that_are_replaced(name: str | None, is_ours: bool) -> None:
    assert backend.is_ours(name) == is_ours


def text_of(call: Any) -> str:
    began = time.monotonic()
    with pytest.raises(PacelineError) as caught:
        call()
    assert time.monotonic() - began < 20
    return str(caught.value)


def one_stays_away(hosts: str) -> str:
    from paceline.net import lifeline

    rank = int(os.environ["PACELINE_RANK"])
    lifeline.host_id = lambda: hosts[rank]
    open_group(timeout=timedelta(seconds=60))
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if rank in (1, 2):
        store.wait(["over"])
        return ""
    tensor = torch.ones(100)
    text = text_of(lambda: dist.all_reduce(tensor))
    again = text_of(lambda: dist.all_reduce(tensor))
    assert "before this one has failed" in again
    if store.add("failed", 1) == 2:
        store.set("over", "")
    return text


@pytest.mark.parametrize("hosts", ["aaaa", "abcd"])
def test_ranks_that_stay_away_are_named(hosts: str) -> None:
    with LocalJob(num_workers=4, num_servers=1) as job:
        texts = job.run(one_stays_away, hosts)
    for rank in (0, 3):
        assert f"rank {rank}: all_reduce of 100 elements (number 2) of group" in texts[rank]
        assert "did not end within its timeout of 1 s" in texts[rank]
        assert ("rank 1 and rank 2" if hosts == "aaaa" else "worker 1") in texts[rank]
        assert ("rank 2" if hosts == "aaaa" else "worker 2") in texts[rank]
        assert "raise timeout= of init_process_group" in texts[rank]


def one_dies() -> str:
    rank = open_group()
    assert current_session().await_failure(0.0) is None
    dist.barrier()
    if rank == 1:
        os._exit(3)
    return text_of(lambda: dist.all_reduce(torch.ones(3)))


def test_rank_that_dies_is_named_at_once() -> None:
    with LocalJob(num_workers=2, num_servers=1, on_worker_death="stop") as job:
        workers = job.start_all(one_dies)
        assert workers[1].wait(60) == 3
        assert "worker 1 on 127.0.0.1 died" in workers[0].result(60)


def ends_early(hosts: str) -> str:
    from paceline.ddp import group
    from paceline.net import lifeline

    lifeline.host_id = lambda: hosts[int(os.environ["PACELINE_RANK"])]
    group._WHY_S = 0.1
    if open_group():
        return ""
    return text_of(lambda: dist.all_reduce(torch.ones(3)))


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_rank_that_ends_its_loop_early_is_named_with_the_way_out(hosts: str) -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        text = job.run(ends_early, hosts)[0]
    assert "rank 0: all_reduce of 3 elements (number 1) of group '0'" in text
    assert ("rank 1 ended before it came to all_reduce" if hosts == "aa" else "worker 1 left the job before") in text
    assert "tells the others before (all_reduce of the decision), or trains in model.join()" in text


def unlike_operations() -> str:
    rank = open_group()
    return text_of(lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(3)))


def test_unlike_operations_are_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "called barrier" in one["unlike_operations"]
        assert "all_reduce of 3 elements" in one["unlike_operations"]


def rank_that_goes_on_after_an_error() -> list[float]:
    """One rank waits for the values of all, the other one has caught an error and makes its next object."""
    rank = open_group()
    table = [torch.full((2,), -1.0, dtype=torch.float64) for _ in range(2)]
    other = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    mine = torch.full((2,), 4 if rank else 4.0, dtype=torch.int64 if rank else torch.float64)
    text_of(lambda: dist.all_gather(other if rank else table, mine))
    return [one for row in table for one in row.tolist()]


def test_no_tensor_gets_bytes_of_another_operation(found: list[dict[str, Any]]) -> None:
    assert found[0]["rank_that_goes_on_after_an_error"] == [-1.0] * 4


def row_of_nowhere() -> str:
    """Rank 1 sends a row that no table has: far outside of the memory of rank 0."""
    rank = open_group()
    place = [[5_000_000 * rank]]
    sparse = torch.sparse_coo_tensor(place, torch.ones(1, 4), (50, 4), is_coalesced=True, check_invariants=False)
    with pytest.raises(ProtocolError) as caught:
        dist.all_reduce(sparse)
    return str(caught.value)


def test_index_of_another_rank_is_checked_before_it_says_where_to_write(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        wanted = f"rank 1 has sent index (5000000,) of a sparse tensor, which has shape (50, 4) on rank {rank}"
        assert one["row_of_nowhere"].startswith(wanted)


def meaningless() -> list[str]:
    open_group()
    sparse = torch.sparse_coo_tensor([[1]], [1.0], (3,))
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND),
        lambda: dist.all_reduce(sparse, op=dist.ReduceOp.MAX),
        lambda: dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(3)),
        lambda: dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(4)),
        lambda: dist.reduce_scatter(torch.zeros(3), [torch.zeros(3)]),
        lambda: dist.scatter(torch.zeros(2), [torch.zeros(3)] * 2, src=dist.get_rank()),
        lambda: dist.gather(torch.zeros(2), [torch.zeros(2)] * 3, dst=dist.get_rank()),
        lambda: dist.all_to_all([torch.zeros(1)], [torch.zeros(1)]),
        lambda: dist.broadcast(torch.zeros(1), src=2),
        lambda: dist.reduce(torch.zeros(1), dst=2),
        lambda: dist.gather(torch.zeros(1), dst=2),
        lambda: dist.scatter(torch.zeros(1), src=2),
        lambda: dist.send(torch.zeros(1), 2),
        lambda: dist.recv(torch.zeros(1), 2),
        lambda: dist.broadcast(sparse, src=0),
        lambda: dist.send(sparse, 1 - dist.get_rank()),
        lambda: dist.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 1], [-1, 3]),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            call()
        found.append(str(caught.value))
    dist.barrier()
    return found


def test_operation_without_meaning_is_refused_and_breaks_nothing(found: list[dict[str, Any]]) -> None:
    for one in found:
        bits, sparse, size, gathered, scattered, *lists = one["meaningless"]
        assert "no meaning for elements of torch.float32" in bits
        assert "call to_dense() first" in sparse
        assert "2 times 3 elements" in size
        assert "16 bytes; given are tensors of [12, 12] bytes" in gathered
        assert "reduce_scatter of 2 ranks needs 2 tensors" in scattered
        assert "scatter of 2 ranks needs 2 tensors of 8 bytes; given are tensors of [12, 12] bytes" in lists[0]
        assert "gather of 2 ranks needs 2 tensors of 8 bytes; given are tensors of [8, 8, 8] bytes" in lists[1]
        assert "all_to_all of 2 ranks needs 2 tensors on each side; given are (1, 1)" in lists[2]
        for what, text in zip(("broadcast", "reduce", "gather", "scatter", "send", "recv"), lists[3:], strict=False):
            assert text == f"{what} names rank 2 of a group whose ranks are 0 to 1"
        assert all("call to_dense() first" in text for text in lists[-3:-1])
        assert lists[-1] == "2 rows cannot be split into [-1, 3] for 2 ranks"


def receives_another_size() -> list[str]:
    rank = open_group()
    dist.isend(torch.ones(2), 1 - rank)
    found = []
    for numel in (3, 2):
        with pytest.raises((ValueError, PacelineError)) as caught:
            dist.recv(torch.zeros(numel), 1 - rank)
        found.append(str(caught.value))
    return found


def test_receive_of_another_size_names_the_sender_and_the_way_out(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        text, later = one["receives_another_size"]
        assert f"rank {1 - rank} has sent 8 bytes" in text
        assert "a tensor of 12 (3 elements of torch.float32)" in text
        assert "with the sender's size and dtype; where these change, let it send them first" in text
        assert "was not started" in later


def shard() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    open_group()
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    return [
        text_of(lambda: model(torch.ones(1, 4))),
        text_of(lambda: distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).full_tensor()),
    ]


def test_sharded_model_is_refused_in_one_sentence(found: list[dict[str, Any]]) -> None:
    assert all("runs data parallel training only" in text for one in found for text in one["shard"])


def capabilities() -> list[bool]:
    open_group()
    group: Any = dist.group.WORLD
    assert group is not None
    asked = [getattr(dist, name, lambda: False)() for name in ("_supports_reconfigure", "_supports_window")]
    names = ("splitting", "shrinking", "coalescing", "reconfigure", "window")
    return [*asked, *(getattr(group, f"supports_{name}") for name in names)]


def test_group_says_what_it_cannot_do_and_never_raises(found: list[dict[str, Any]]) -> None:
    assert [one["capabilities"] for one in found] == [[False] * 7] * 2
    with pytest.raises(PacelineError, match="enable_reconfigure=True, and the members of a group of paceline do not"):
        backend._init(lambda *args, **kwargs: None, enable_reconfigure=True)


def test_entry_point_registers_the_backend_where_the_import_of_torch_has_called_nothing() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "torch.distributed.backends"  # which PyTorch reads when a script asks for a backend that it does not know
    [(name, value)] = project["entry-points"][group].items()
    code = (
        "from importlib.metadata import EntryPoint\n"
        "from torch import distributed as dist\n"
        "assert 'paceline' not in dist.Backend.backend_list\n"
        f"EntryPoint({name!r}, {value!r}, {group!r}).load()()\n"
        f"assert {name!r} in dist.Backend.backend_list\n"
        "dist.init_process_group('paceline', rank=0, world_size=1, store=dist.HashStore())\n"
    )
    env = {name: text for name, text in os.environ.items() if not name.startswith("PACELINE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "start the script with `paceline launch" in done.stderr.splitlines()[-1]


def test_other_ranks_than_the_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RANK", "0")
    monkeypatch.setenv("PACELINE_NUM_WORKERS", "2")
    with pytest.raises(PacelineError, match="world_size=8, and this job has world_size 2"):
        backend._init(lambda *args, **kwargs: None, "nccl", "tcp://127.0.0.1:1", world_size=8, rank=0)


def with_a_rewritten_environment(ranks: bool) -> float:
    """A trainer that was made for a launcher of its own sets the variables before it opens the group."""
    backend.register()
    backend.replace_init()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    rank = int(os.environ["PACELINE_RANK"])
    dist.init_process_group("gloo", **({"rank": rank, "world_size": 2} if ranks else {}))
    total = torch.full((1,), 1.0 + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("ranks", [True, False])
def test_ranks_are_those_of_the_job_whatever_the_environment_says(ranks: bool) -> None:
    with LocalJob(num_workers=2, num_servers=1) as job:
        assert job.run(with_a_rewritten_environment, ranks) == [3.0, 3.0]


def test_hook_of_torch_does_nothing_outside_of_jobs_and_never_fails(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from paceline.ddp import on_torch_import\n"
        "began = time.process_time(); on_torch_import(); taken = time.process_time() - began\n"
        "assert taken < 0.001, taken\n"
        "assert 'torch' not in sys.modules\n"
        "import os; os.environ |= {'PACELINE_SCHEDULER': 'tcp://127.0.0.1:1', 'PACELINE_DDP': '1'}\n"
        "sys.modules['torch'] = None\n"
        "on_torch_import()\n"
    )
    env = {name: text for name, text in os.environ.items() if not name.startswith("PACELINE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "torch.distributed stays as it is" in done.stderr
