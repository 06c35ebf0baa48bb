"""Every operation, on 1 to 4 ranks, against what one process computes.

Each job runs all cases. `nox -s hvd` runs them on every number of ranks, over every way between ranks, with and
without fusion and cache; `make test` runs a part of these jobs.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline.hvd as hvd
from paceline.net.security import new_job_key
from tests.hvd.ranks import LONG, Ranks

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = ((17,), (4, 5), (3, 2, 7))


def content(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + len(shape))
    whole = torch.randint(-20 if dtype != torch.uint8 else 0, 21, shape, generator=generator)
    return whole.to(dtype) / 4 if dtype.is_floating_point else whole.to(dtype)


def expected(parts: list[torch.Tensor], op: int) -> torch.Tensor:
    wide = torch.stack([part.double() if part.dtype.is_floating_point else part.long() for part in parts])
    if op == hvd.Min:
        return wide.amin(0).to(parts[0].dtype)
    if op == hvd.Max:
        return wide.amax(0).to(parts[0].dtype)
    if op == hvd.Product:
        return wide.prod(0).to(parts[0].dtype)
    total = wide.sum(0)
    if op == hvd.Average:
        divided = total / len(parts)
        total = divided if total.is_floating_point() else divided.trunc()
    return total.to(parts[0].dtype)


def reduce_everything() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    wrong = []
    ops = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
    handles = []
    for dtype, shape, op in itertools.product((*FLOATS, *INTEGERS), SHAPES, ops):
        parts = [content(shape, dtype, one) for one in range(size)]
        name = f"{dtype} {shape} {op}"
        wanted = expected(parts, op)
        if not close(hvd.allreduce(parts[rank], name=name, op=op), wanted):
            wrong.append(name)
        in_place = parts[rank].clone()
        if hvd.allreduce_(in_place, name=name, op=op) is not in_place or not close(in_place, wanted):
            wrong.append(name + " in place")
        handles.append((hvd.allreduce_async(parts[rank], name=name + " fused", op=op), wanted, name + " fused"))
    for handle, wanted, name in handles:
        if not close(hvd.synchronize(handle), wanted):
            wrong.append(name)
    for handle, _, name in handles:
        if hvd.synchronize(handle) is not None:
            wrong.append(name + " twice")
    return wrong


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    exact = not wanted.dtype.is_floating_point
    return found.dtype == wanted.dtype and (
        torch.equal(found, wanted)
        if exact
        else torch.allclose(found, wanted, rtol=2e-2 if wanted.itemsize == 2 else 1e-6)
    )


def scale_everything() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    wrong = []
    for dtype in (*FLOATS, *INTEGERS):
        parts = [content((9,), dtype, one) for one in range(size)]
        pre, post = 0.5, 3.0
        scaled = [part.double() * pre if dtype.is_floating_point else (part.double() * pre).trunc() for part in parts]
        for op in (hvd.Sum, hvd.Average):
            factor = post / size if op == hvd.Average else post
            wanted = torch.stack(scaled).sum(0)
            if not dtype.is_floating_point:
                wanted = wanted.long().to(torch.int64).double()
            wanted = wanted * factor
            wanted = wanted if dtype.is_floating_point else wanted.trunc().long()
            found = hvd.allreduce(parts[rank], op=op, prescale_factor=pre, postscale_factor=post, name=f"{dtype}{op}")
            if not close(found, wanted.to(dtype)):
                wrong.append(f"{dtype} {op}: {found} {wanted}")
    big = torch.tensor([2**53 + 1, -(2**53) - 1])
    if hvd.allreduce(big, op=hvd.Average, name="big").tolist() != big.tolist():
        wrong.append("a mean of large integers is not exact")
    return wrong


def large_tensors() -> list[str]:
    """Several chunks of shared memory, and the edges between them."""
    rank, size = hvd.rank(), hvd.size()
    wrong = []
    for numel in (131_071, 131_072, 131_073, 700_001):
        x = torch.arange(numel, dtype=torch.float32) % 1000 + rank
        wanted = (torch.arange(numel, dtype=torch.float32) % 1000) * size + sum(range(size))
        if not torch.equal(hvd.allreduce(x, op=hvd.Sum, name="r"), wanted):
            wrong.append(f"allreduce {numel}")
        own = x.clone()
        hvd.allreduce_(own, op=hvd.Sum, name="i")
        if not torch.equal(own, wanted):
            wrong.append(f"allreduce_ {numel}")
        if not torch.equal(hvd.broadcast(x, size - 1, name="b"), x - rank + size - 1):
            wrong.append(f"broadcast {numel}")
        gathered = hvd.allgather(x[: numel - rank], name="g")
        if not torch.equal(gathered, torch.cat([x[: numel - one] - rank + one for one in range(size)])):
            wrong.append(f"allgather {numel}")
        part = hvd.reducescatter(x, op=hvd.Sum, name="s")
        start = sum(numel // size + (one < numel % size) for one in range(rank))
        if not torch.equal(part, wanted[start : start + len(part)]):
            wrong.append(f"reducescatter {numel}")
        splits = [numel // size - one for one in range(size)]
        received = hvd.alltoall(x, splits, name="a")[0]
        mine = sum(splits[:rank])
        if not torch.equal(received, torch.cat([x[mine : mine + splits[rank]] - rank + one for one in range(size)])):
            wrong.append(f"alltoall {numel}")
    return wrong


def move_everything() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    wrong = []
    for dtype, dims in itertools.product((*FLOATS, *INTEGERS, torch.bool), (1, 2, 3)):
        rest = (3, 2)[: dims - 1]
        name = f"{dtype} {dims}"

        def make(one: int, rows: int, rest: tuple[int, ...] = rest, dtype: torch.dtype = dtype) -> torch.Tensor:
            return content((rows, *rest), torch.int64, one).to(dtype)

        gathered = hvd.allgather(make(rank, rank + 1), name=name)
        if not torch.equal(gathered, torch.cat([make(one, one + 1) for one in range(size)])):
            wrong.append(name + " allgather")
        root = size - 1
        mine = make(rank, 4)
        if not torch.equal(hvd.broadcast(mine, root, name=name), make(root, 4)):
            wrong.append(name + " broadcast")
        if hvd.broadcast_(mine, root, name=name) is not mine or not torch.equal(mine, make(root, 4)):
            wrong.append(name + " broadcast_")
        splits = [one + rank for one in range(size)]
        received, counts = hvd.alltoall(make(rank, sum(splits)), splits, name=name)
        wanted = []
        for one in range(size):
            start = sum(other + one for other in range(rank))
            wanted.append(make(one, sum(other + one for other in range(size)))[start : start + rank + one])
        if not torch.equal(received, torch.cat(wanted)) or counts.tolist() != [one + rank for one in range(size)]:
            wrong.append(name + " alltoall")
        if dtype == torch.bool:
            continue
        rows = 2 * size + 1
        parts = [make(one, rows) for one in range(size)]
        start = rank * 2 + min(rank, 1)
        for op in (hvd.Sum, hvd.Average):
            found = hvd.reducescatter(parts[rank], name=f"{name} {op}", op=op)
            if not close(found, expected(parts, op)[start : start + 2 + (rank < 1)]):
                wrong.append(f"{name} reducescatter {op}")
        group = hvd.grouped_allreduce([parts[rank], parts[rank][:1]], name=name, op=hvd.Sum)
        whole = expected(parts, hvd.Sum)
        if not close(group[0], whole) or not close(group[1], whole[:1]):
            wrong.append(name + " grouped_allreduce")
    if not torch.equal(hvd.alltoall(torch.arange(2 * size)), torch.arange(2 * rank, 2 * rank + 2).repeat(size)):
        wrong.append("alltoall without splits")
    if hvd.allgather(torch.ones(0, 3), name="empty").shape != (0, 3):
        wrong.append("allgather of nothing")
    hvd.barrier()
    return wrong


def groups() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    wrong = []
    mixed = [torch.full((3,), float(rank)), torch.full((2, 2), rank), torch.full((1,), rank, dtype=torch.bfloat16)]
    total = sum(range(size))
    found = hvd.grouped_allreduce(mixed, op=hvd.Sum, name="mixed")
    if [one.flatten()[0].item() for one in found] != [total] * 3 or found[1].dtype != torch.int64:
        wrong.append("grouped_allreduce")
    own = [one.clone() for one in mixed]
    if hvd.grouped_allreduce_(own, op=hvd.Sum)[0] is not own[0] or own[0][0].item() != total:
        wrong.append("grouped_allreduce_")
    gathered = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.full((1, 2), rank)])
    if [len(one) for one in gathered] != [size * (size + 1) // 2, size]:
        wrong.append("grouped_allgather")
    scattered = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size, 3)], op=hvd.Sum)
    if [tuple(one.shape) for one in scattered] != [(1,), (2, 3)] or scattered[1][0, 0].item() != size:
        wrong.append("grouped_reducescatter")
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (size + 2,))
    dense = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense()
    if not torch.allclose(dense, torch.tensor([1.0, *[2.0 / size] * size, 0.0])):
        wrong.append(f"sparse {dense}")
    if hvd.allreduce(torch.tensor([1.0 + rank]), compression=hvd.Compression.fp16, op=hvd.Sum).dtype != torch.float32:
        wrong.append("compression")
    return wrong


def any_order() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    names = [f"t{number}" for number in range(40)]
    order = names[::-1] if rank else names
    for _ in range(3):
        handles = {
            name: hvd.allreduce_async(torch.full((7,), float(name[1:])), name=name, op=hvd.Sum) for name in order
        }
        for name in names:
            found = hvd.synchronize(handles[name])
            if found[0].item() != size * float(name[1:]):
                return [name]
    return []


def adasum() -> list[str]:
    rank, size = hvd.rank(), hvd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return []
    wrong = []
    for dtype, shape in itertools.product(FLOATS, SHAPES):
        parts = [content(shape, dtype, one) for one in range(size)]
        level = [part.double() for part in parts]
        while len(level) > 1:
            level = [merged(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
        found = hvd.allreduce(parts[rank], op=hvd.Adasum, name=f"{dtype} {shape} adasum")
        near = 2e-2 if dtype.itemsize == 2 else 1e-5
        if found.dtype != dtype or not torch.allclose(found.double(), level[0], rtol=near, atol=near):
            wrong.append(f"adasum {dtype} {shape}")
    if hvd.allreduce(torch.zeros(3), op=hvd.Adasum, name="z").abs().sum() != 0:
        wrong.append("adasum of zeros")
    return wrong


def merged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def gradients() -> list[str]:
    """Gradients through operations, by their formulas."""
    rank, size = hvd.rank(), hvd.size()
    wrong = []

    def gradient_of(operation: Any, rows: int) -> tuple[Any, torch.Tensor | None]:
        x = torch.full((rows, 2), float(rank + 1), requires_grad=True)
        out = operation(x)
        weight = torch.arange(out.numel(), dtype=torch.float32).view(out.shape) + rank
        (out * weight).sum().backward()
        return weight, x.grad

    def mean_weight(weight: torch.Tensor) -> torch.Tensor:
        return weight - rank + sum(range(size)) / size

    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(size))):
        weight, grad = gradient_of(lambda x, op=op: hvd.allreduce(x, op=op), 3)
        if not torch.allclose(grad, mean_weight(weight) * factor):
            wrong.append(f"allreduce {op}")
        weight, grad = gradient_of(lambda x, op=op: hvd.reducescatter(x, op=op), 2 * size)
        every = torch.cat([torch.arange(4.0).view(2, 2) + one for one in range(size)])
        if not torch.allclose(grad, every * factor):
            wrong.append(f"reducescatter {op} {grad}")
    weight, grad = gradient_of(hvd.allgather, rank + 1)
    start = sum(range(1, rank + 1))
    if not torch.allclose(grad, mean_weight(weight)[start : start + rank + 1]):
        wrong.append("allgather")
    weight, grad = gradient_of(lambda x: hvd.broadcast(x, size - 1), 3)
    if not torch.allclose(grad, mean_weight(weight) if rank == size - 1 else torch.zeros(3, 2)):
        wrong.append("broadcast")
    weight, grad = gradient_of(hvd.alltoall, size)
    if not torch.allclose(grad, torch.stack([torch.arange(2.0) + 2 * rank + one for one in range(size)])):
        wrong.append(f"alltoall {grad}")
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    one, other = hvd.grouped_allreduce([a, b], op=hvd.Sum)
    (one.sum() + 2 * other.sum()).backward()
    if a.grad.tolist() != [size] * 2 or b.grad.tolist() != [2 * size] * 2:
        wrong.append("grouped_allreduce")
    return wrong


CASES: tuple[Callable[[], list[str]], ...] = (
    reduce_everything, scale_everything, large_tensors, move_everything, groups, any_order, adasum, gradients,
)  # fmt: skip


def all_cases() -> list[str]:
    hvd.init()
    return [f"{case.__name__}: {one}" for case in CASES for one in case()]


NOTHING_FUSED = {"HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_FUSION_THRESHOLD": "0"}
WAYS = ("shared memory", "gloo", "hosts")
#: Ranks, way between them, whether operations are fused and cached.
SHORT = [(1, "gloo", True), (2, "gloo", False), (3, "hosts", True), (4, "shared memory", True)]
EVERY = [SHORT[0], *itertools.product((2, 3, 4), WAYS, (True, False))]


def way_of(way: str, size: int) -> tuple[dict[str, str], Callable[[int], dict[str, str]]]:
    """Return the variables of all ranks, and those of each rank."""
    if way != "hosts":
        return {"PACELINE_SHARED_MEMORY": str(int(way == "shared memory"))}, lambda rank: {}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = (size + 1) // 2  # ranks on the first of two hosts

    def by_rank(rank: int) -> dict[str, str]:
        near = first if rank < first else size - first
        return {"LOCAL_WORLD_SIZE": str(near), "HOROVOD_HOSTNAME": "a" if rank < first else "b"}

    return {"PACELINE_JOB_KEY": new_job_key(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, by_rank


@pytest.mark.parametrize(("size", "way", "fused"), EVERY if LONG else SHORT)
def test_every_operation_dtype_and_dimension(size: int, way: str, fused: bool) -> None:
    environment, by_rank = way_of(way, size)
    environment |= {} if fused else NOTHING_FUSED
    assert Ranks(all_cases, size, environment=environment, by_rank=by_rank).results() == [[]] * size
