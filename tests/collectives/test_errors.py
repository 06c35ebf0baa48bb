"""Where ranks disagree all of them get an exception; nobody hangs."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any, TypeAlias

import pytest
import torch

import paceline.hvd as hvd
from paceline.collectives import world
from paceline.collectives.environment import HvdSettings, read_settings
from paceline.collectives.errors import CollectiveError, NotInitializedError
from paceline.errors import PacelineError
from tests.hvd.ranks import LONG, Ranks, run, run_in_turn

T = torch.ones
Found: TypeAlias = dict[str, list[Any]]


@pytest.fixture(scope="module")
def two() -> Found:
    """Results of two ranks, by function."""
    return run_in_turn(2, wrong_arguments, same_name_twice, different_kinds)


def error_of(operation: Any) -> str:
    try:
        operation()
    except (hvd.HorovodInternalError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def row(index: int, height: int) -> torch.Tensor:
    """Return a gradient of one row of a table; the row may be none of it."""
    return torch.sparse_coo_tensor([[index]], T(1, 3), (height, 3), is_coalesced=True, check_invariants=False)


def mismatches() -> list[str]:
    """The last rank differs from the others, each time in something else."""
    hvd.init()
    last = hvd.rank() == hvd.size() - 1
    r = int(last)
    dtype = torch.float32 if last else torch.float16
    operations: list[Any] = [
        lambda name: hvd.allreduce(T(2, dtype=torch.float32 if r else torch.int32), name=name),
        lambda name: hvd.allreduce(T(2 + r), name=name),
        lambda name: hvd.allreduce(T((1,) * (1 + r)), name=name),
        lambda name: hvd.allreduce(T(2), name=name, op=hvd.Sum if r else hvd.Min),
        lambda name: hvd.allreduce(T(2), name=name, prescale_factor=1.0 + r),
        lambda name: hvd.allreduce(T(2), name=name, postscale_factor=1.0 + r),
        lambda name: hvd.grouped_allreduce([T(1)] * (1 + r), name=name),
        lambda name: hvd.grouped_allreduce([T(1), T(1, dtype=dtype)], name=name),
        lambda name: hvd.grouped_allreduce([T(1), T(1 + r)], name=name),
        lambda name: hvd.synchronize(hvd.allreduce_async_(T(1), name=name, deterministic=last)),
        lambda name: hvd.broadcast(T(2), r, name=name),
        lambda name: hvd.broadcast(T(2 + r), 0, name=name),
        lambda name: hvd.broadcast(T(2, dtype=dtype), 0, name=name),
        lambda name: hvd.allgather(T(2, 2 + r), name=name),
        lambda name: hvd.allgather(T((2,) * (2 + r)), name=name),
        lambda name: hvd.allgather(T(2, dtype=dtype), name=name),
        lambda name: hvd.allgather(torch.tensor(1.0), name=name),
        lambda name: hvd.grouped_allgather([T(1)] * (1 + r), name=name),
        lambda name: hvd.alltoall(T(4, 2 + r), [1] * hvd.size(), name=name),
        lambda name: hvd.alltoall(T((4,) * (1 + r)), [1] * hvd.size(), name=name),
        lambda name: hvd.alltoall(T(4, dtype=dtype), [1] * hvd.size(), name=name),
        lambda name: hvd.reducescatter(T(4 + r), name=name),
        lambda name: hvd.reducescatter(T((4,) * (1 + r)), name=name),
        lambda name: hvd.reducescatter(T(4, dtype=dtype), name=name),
        lambda name: hvd.reducescatter(T(4), name=name, op=hvd.Sum if r else hvd.Average),
        lambda name: hvd.reducescatter(T(4), name=name, op=hvd.Sum, prescale_factor=1.0 + r),
        lambda name: hvd.reducescatter(torch.tensor(1.0), name=name),
        lambda name: hvd.sparse_allreduce_async(row(0, 2 + r), name, hvd.Sum)(),
        lambda name: hvd.broadcast_object(1, r),
    ]
    found = []
    for number, operation in enumerate(operations):
        name = f"mismatch {number}"
        found.append(error_of(lambda operation=operation, name=name: operation(name)))
        # The name can be used again, and an operation that was cached may change on one rank, too.
        for _ in range(2):
            assert hvd.allreduce(T(2), name=name).tolist() == [1.0, 1.0], name
        again = error_of(lambda operation=operation, name=name: operation(name))
        assert again == found[-1], name
    return found


@pytest.mark.parametrize("size", [2, 3, 4] if LONG else [3])
def test_every_mismatch_is_the_same_error_on_all_ranks(size: int) -> None:
    first, *others = run(mismatches, size)
    assert all(other == first for other in others)
    assert all(one.startswith("CollectiveError: ") for one in first), first
    assert "One rank had type int32, but another rank had type float32. (rank 0: int32" in first[0]
    last = size - 1
    assert f"(rank 0: [2, 3], rank {last}: [3, 3]) [allgather 'mismatch 27.entries']" in first[27]


def wrong_arguments() -> list[str]:
    before = [error_of(hvd.rank), error_of(lambda: hvd.allreduce(T(1)))]
    sets: list[Any] = [[[0, 5]], [[]], [[0, 0]], [[-1]], [[0], [0]], [[1, 0]]]
    wrong_sets = [error_of(lambda one=one: hvd.init(process_sets=one)) for one in sets]
    hvd.init()
    return [
        *before,
        error_of(lambda: hvd.reducescatter(T(3), op=hvd.Min)),
        error_of(lambda: hvd.reducescatter(T(4), op=hvd.Adasum)),
        error_of(lambda: hvd.grouped_reducescatter([T(4)], op=hvd.Adasum)),
        error_of(lambda: hvd.allreduce(T(1), average=True, op=hvd.Sum)),
        error_of(lambda: hvd.allreduce(torch.ones(1, dtype=torch.complex64))),
        error_of(lambda: hvd.allreduce(torch.ones(1, dtype=torch.bool))),
        error_of(lambda: hvd.allreduce_(T(4, 4)[:, :2], name="strided")),
        error_of(lambda: hvd.alltoall(T(3), splits=[1])),
        error_of(lambda: hvd.alltoall(T(3), splits=[2, 2])),
        error_of(lambda: hvd.alltoall(T(3))),
        error_of(lambda: hvd.broadcast(T(3), 7)),
        error_of(lambda: hvd.allreduce(T(1), op=17)),
        error_of(lambda: hvd.grouped_allreduce([])),
        error_of(lambda: hvd.allreduce(T(1, device="meta"))),
        error_of(lambda: hvd.allreduce(T(1), process_set=hvd.ProcessSet([0]))),
        error_of(lambda: hvd.add_process_set([0])),
        *wrong_sets,
    ]


def test_wrong_arguments_are_errors_at_the_call(two: Found) -> None:
    first, _ = two["wrong_arguments"]
    assert first[:2] == ["NotInitializedError: Horovod has not been initialized; use hvd.init()."] * 2
    assert issubclass(NotInitializedError, ValueError)
    assert issubclass(NotInitializedError, CollectiveError)
    assert all(one.startswith("CollectiveError: ") for one in first[2:5]), first
    assert all("can average or sum" in one for one in first[2:5]), first
    assert all(one.startswith("ValueError: ") for one in first[5:]), first
    assert "ranks [0, 5]; it needs different ranks from 0 to 1" in first[-6]


def same_name_twice() -> list[str]:
    hvd.init()
    found = ""
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(T(1), name="x")
        found = error_of(lambda: hvd.allreduce_async(T(1), name="x"))
        hvd.barrier()
        hvd.synchronize(handle)
    else:
        hvd.barrier()
        hvd.allreduce(T(1), name="x")
    return [found]


def test_second_pending_operation_of_a_name_is_refused(two: Found) -> None:
    [found], _ = two["same_name_twice"]
    assert found.startswith("ValueError: Requested to allreduce, allgather, or broadcast a tensor with the same name")


def one_shuts_down() -> str:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.shutdown()
        return ""
    first = error_of(lambda: hvd.allreduce(T(1), name="never"))
    second = error_of(lambda: hvd.allreduce(T(1), name="again"))
    assert first == second
    hvd.shutdown()
    return first


def test_shutdown_of_one_rank_fails_what_is_pending_and_names_it() -> None:
    first, _, third = run(one_shuts_down, 3)
    assert first == third
    assert "has been shut down by rank 1: hvd.shutdown() was called" in first


def one_is_killed() -> str:
    hvd.init()
    hvd.allreduce(T(1), name="x")
    if hvd.rank() == int(os.environ["VICTIM"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: hvd.allreduce(T(1), name="x"))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("shared", ["1", "0"])
def test_death_of_a_rank_is_an_error_on_the_others(victim: int, shared: str) -> None:
    ranks = Ranks(one_is_killed, 3, environment={"VICTIM": str(victim), "PACELINE_SHARED_MEMORY": shared})
    codes = ranks.codes()
    assert codes[victim] == -signal.SIGKILL
    assert [code for rank, code in enumerate(codes) if rank != victim] == [0, 0], ranks.output(2)


SHUT_DOWN_BY_1 = "CollectiveError: Horovod has been shut down by rank 1: "[:55]


def one_is_killed_while_others_reduce() -> str:
    hvd.init()
    x = T(4_000_000)
    hvd.allreduce(x, name="x")
    if hvd.rank() == 1:
        hvd.allreduce_async(x, name="x")
        hvd.allreduce_async(x, name="y")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        found = error_of(lambda: (hvd.allreduce(x, name="x"), hvd.allreduce(x, name="y")))
        if found:
            return found
    return ""


@pytest.mark.parametrize("shared", ["1", "0"])
def test_death_inside_of_an_operation_is_an_error_on_the_others(shared: str) -> None:
    ranks = Ranks(one_is_killed_while_others_reduce, 3, environment={"PACELINE_SHARED_MEMORY": shared})
    assert ranks.codes() == [0, -signal.SIGKILL, 0], ranks.output(0)
    assert [ranks.result(rank)[:55] for rank in (0, 2)] == [SHUT_DOWN_BY_1] * 2


def noticing_conflicts_soon() -> HvdSettings:
    """Return the settings, with a second for what takes ten."""
    found = read_settings()
    return dataclasses.replace(found, options=dataclasses.replace(found.options, conflict_s=1.0))


def different_kinds() -> str:
    world.read_settings = noticing_conflicts_soon
    hvd.init()
    return error_of(lambda: hvd.allreduce(T(1), name="x") if hvd.rank() else hvd.allgather(T(1), name="x"))


def test_one_name_for_different_operations_is_an_error(two: Found) -> None:
    first, second = two["different_kinds"]
    assert first == second
    assert "allgather: rank 0" in first


def stalled() -> str:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 0:
        return error_of(lambda: hvd.allreduce(T(1), name="lonely"))
    return error_of(hvd.barrier)


def test_stall_is_reported_and_ends_the_job() -> None:
    environment = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    ranks = Ranks(stalled, 2, environment=environment)
    first, second = ranks.results()
    assert first == second
    assert "1: [allreduce.lonely]" in first
    assert "0: [barrier.barrier.noname]" in first
    assert "Missing ranks" in ranks.output(0)


def nobody_else() -> str:
    try:
        hvd.init()
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_init_without_the_others_names_them() -> None:
    ranks = Ranks(
        nobody_else, 1, environment={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HOROVOD_START_TIMEOUT": "0.5"}
    )
    [found] = ranks.results()
    assert found.startswith("JoinTimeoutError: rank 0: rank 1 of 2 did not call hvd.init() within 0.5 s")


def no_key() -> str:
    return nobody_else()


def test_ranks_on_several_hosts_need_a_key() -> None:
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    [found] = run(no_key, 1, environment=environment)
    assert found.startswith("ConfigError: ranks on several hosts need a key")


def objects_without_key() -> list[str]:
    hvd.init()
    found = []
    for operation in (lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1)):
        try:
            operation()
        except PacelineError as error:
            found.append(f"{type(error).__name__}: {error}")
    return [*found, str(hvd.allreduce(T(1), op=hvd.Sum).item())]


@pytest.mark.parametrize("everywhere", [True, False])
def test_objects_are_not_unpickled_in_a_job_without_a_key(everywhere: bool) -> None:
    def of_rank(rank: int) -> dict[str, str]:
        return {"PACELINE_INSECURE": "1"} if everywhere or rank == 0 else {}  # rank 0 makes the key, or none

    for found in run(objects_without_key, 2, by_rank=of_rank):
        assert [one[:12] for one in found] == ["ConfigError:", "ConfigError:", "2.0"]
