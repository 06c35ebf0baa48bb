"""Every operation of a group, on each way between ranks, against Gloo in the same processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from paceline.ddp import backend
from paceline.net import lifeline
from paceline.testing import LocalJob

#: Place of each rank on each way: ranks of one host share memory.
WAYS = {"one host": "aaa", "two hosts": "aab", "every rank alone": "abc"}

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8)
Case = Callable[[Any], list[torch.Tensor]]


def start(hosts: str, folder: str) -> None:
    """Join the job from a host, and make a group of Gloo with all ranks."""
    rank = int(os.environ["PACELINE_RANK"])
    lifeline.host_id = lambda: hosts[rank]
    backend.register()
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=len(hosts))


def content(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return small integers, so that sums are exact in any order; other ones on each rank."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def finished(work: Any, wait: bool) -> None:
    if wait:
        work.wait()
        assert work.is_completed()


def reductions() -> Iterator[tuple[str, Case]]:
    ops = {
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "product": dist.ReduceOp.PRODUCT,
    }
    bits = {"band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}
    for dtype in (*FLOATS, *WHOLE):
        for name, op in (ops | (bits if dtype in WHOLE else {})).items():
            yield f"all_reduce {name} {dtype}", partial(all_reduce, op, dtype, False)
        yield f"all_reduce async {dtype}", partial(all_reduce, dist.ReduceOp.SUM, dtype, True)
        yield f"reduce {dtype}", partial(reduce, dtype)
    for dtype in (torch.float32, torch.int64):
        yield f"sparse {dtype}", partial(sparse, dtype)


def all_reduce(op: Any, dtype: torch.dtype, is_async: bool, group: Any) -> list[torch.Tensor]:
    tensors = [content(dtype, 7, 3), content(dtype, 3, 7).t(), content(dtype), content(dtype, 0)]
    for one in tensors:
        finished(dist.all_reduce(one, op, group=group, async_op=is_async), is_async)
    return tensors


def sparse(dtype: torch.dtype, group: Any) -> list[torch.Tensor]:
    """Add tensors with as many elements as the rank says, at the same places and at others; the first has none."""
    rank = dist.get_rank()
    found = []
    for dense_shape in ((), (3,)):
        places = torch.stack([torch.arange(rank), torch.zeros(rank, dtype=torch.int64)])
        tensor = torch.sparse_coo_tensor(places, content(dtype, rank, *dense_shape), (3, 2, *dense_shape))
        dist.all_reduce(tensor, group=group)
        found.append(tensor.to_dense())
    return found


def reduce(dtype: torch.dtype, group: Any) -> list[torch.Tensor]:
    tensor, root = content(dtype, 5), dist.get_process_group_ranks(group)[-1]
    dist.reduce(tensor, root, group=group)
    return [tensor] if dist.get_rank() == root else []


def moves() -> Iterator[tuple[str, Case]]:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for is_async in (False, True):
            for move in (broadcast, all_gather, gather, scatter):
                yield f"{move.__name__} {dtype} {is_async}", partial(move, dtype, is_async)
    for move in (into_tensor, reduce_scatter, in_place, inference, negated, all_to_all, splits, pairs, objects):
        yield move.__name__, move


def broadcast(dtype: torch.dtype, is_async: bool, group: Any) -> list[torch.Tensor]:
    tensor = content(torch.float32, 4, 3).to(dtype).t()
    root = dist.get_process_group_ranks(group)[1]
    if dtype == torch.float8_e4m3fn:  # not a dtype of Gloo
        tensor = tensor.contiguous().view(torch.uint8)
    finished(dist.broadcast(tensor, root, group=group, async_op=is_async), is_async)
    return [tensor]


def _mine(dtype: torch.dtype) -> torch.Tensor:
    tensor = content(torch.float32, 4, 3).to(dtype)
    return tensor.view(torch.uint8) if dtype in (torch.float8_e4m3fn, torch.bool, torch.complex64) else tensor


def all_gather(dtype: torch.dtype, is_async: bool, group: Any) -> list[torch.Tensor]:
    mine = _mine(dtype)
    outputs = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    finished(dist.all_gather(outputs, mine, group=group, async_op=is_async), is_async)
    return outputs


def gather(dtype: torch.dtype, is_async: bool, group: Any) -> list[torch.Tensor]:
    mine, root = _mine(dtype), dist.get_process_group_ranks(group)[0]
    outputs = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))] if dist.get_rank() == root else None
    finished(dist.gather(mine, outputs, root, group=group, async_op=is_async), is_async)
    return outputs or []


def scatter(dtype: torch.dtype, is_async: bool, group: Any) -> list[torch.Tensor]:
    mine, root = _mine(dtype), dist.get_process_group_ranks(group)[-1]
    inputs = [mine + one for one in range(dist.get_world_size(group))] if dist.get_rank() == root else None
    finished(dist.scatter(mine, inputs, root, group=group, async_op=is_async), is_async)
    return [mine]


def into_tensor(group: Any) -> list[torch.Tensor]:
    mine = content(torch.float32, 4)
    output = torch.zeros(4 * dist.get_world_size(group))
    dist.all_gather_into_tensor(output, mine, group=group)
    return [output]


def reduce_scatter(group: Any) -> list[torch.Tensor]:
    size = dist.get_world_size(group)
    mine, whole, part = torch.zeros(5), torch.zeros(3), torch.zeros(5)
    dist.reduce_scatter(mine, [content(torch.float32, 5, seed=one) for one in range(size)], group=group)
    dist.reduce_scatter_tensor(whole, content(torch.float32, 3 * size), group=group)
    dist.reduce_scatter(part, list(content(torch.float32, size, 5)), dist.ReduceOp.MAX, group=group)
    return [mine, whole, part]


def in_place(group: Any) -> list[torch.Tensor]:
    """Outputs are parts of inputs, and inputs are parts of outputs; the larger size has several chunks."""
    ranks, found = dist.get_process_group_ranks(group), []
    me = ranks.index(dist.get_rank())
    for numel in (5, 700_001):
        whole = content(torch.float64, numel * len(ranks))
        part = whole[numel * me : numel * (me + 1)]
        dist.reduce_scatter_tensor(part, whole, group=group)
        found.append(part.clone())
        dist.all_gather_into_tensor(whole, part, group=group)
        found.append(whole)
    return found


def inference(group: Any) -> list[torch.Tensor]:
    """Tensors of the inference mode may be changed in it only, and the group's thread is in another mode."""
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    with torch.inference_mode():
        total, turned = content(torch.float32, 4), content(torch.float32, 3, 4).t()
        found = [torch.zeros(4) for _ in range(len(others) + 1)]
        got = [torch.zeros(4) for _ in others]
        works = [dist.all_reduce(one, group=group, async_op=True) for one in (total, turned)]
        works.append(dist.all_gather(found, content(torch.float32, 4), group=group, async_op=True))
        works += [dist.isend(content(torch.float32, 4), rank, group=group) for rank in others]
        works += [dist.irecv(one, rank, group=group) for one, rank in zip(got, others, strict=True)]
        for work in works:
            work.wait()
    return [total, turned, *found, *got]


def negated(group: Any) -> list[torch.Tensor]:
    """PyTorch negates the elements of these tensors when it reads them, and Gloo moves those in memory."""
    mine = torch.complex(content(torch.float32, 1), content(torch.float32, 1, seed=1)).conj()
    if dist.get_backend(group) == "gloo":
        mine = mine.resolve_conj()
    total, outputs = mine.imag, [torch.zeros(1) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outputs, total, group=group)
    dist.all_reduce(total, group=group)
    pair = torch.view_as_real(mine.resolve_conj())
    if dist.get_backend(group) == "gloo":
        dist.broadcast(pair, dist.get_process_group_ranks(group)[0], group=group)
    else:
        group.broadcast([mine], _from_first()).wait()
        pair = torch.view_as_real(mine.resolve_conj())
    return [*outputs, total.resolve_neg(), pair]


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def all_to_all(group: Any) -> list[torch.Tensor]:
    ranks = dist.get_process_group_ranks(group)
    me = ranks.index(dist.get_rank())
    outputs = [torch.zeros(me + 1) for _ in ranks]
    inputs = [content(torch.float32, one + 1, seed=one) for one in range(len(ranks))]
    if dist.get_backend(group) == "gloo":  # which has no all_to_all of lists
        whole, sent = torch.cat(inputs), [one.numel() for one in inputs]
        target = torch.zeros(len(ranks) * (me + 1))
        dist.all_to_all_single(target, whole, [me + 1] * len(ranks), sent, group=group)
        return list(target.split(me + 1))
    dist.all_to_all(outputs, inputs, group=group)
    return outputs


def splits(group: Any) -> list[torch.Tensor]:
    size = dist.get_world_size(group)
    target = torch.zeros(size, 2)
    dist.all_to_all_single(target, content(torch.float32, size, 2), group=group)
    return [target]


def pairs(group: Any) -> list[torch.Tensor]:
    """Everybody sends to everybody, with two tags, and the last rank takes from anybody."""
    ranks = dist.get_process_group_ranks(group)
    others = [rank for rank in ranks if rank != dist.get_rank()]
    got = {rank: [torch.zeros(3), torch.zeros(2)] for rank in others}
    works = [dist.isend(content(torch.float32, 3), rank, group=group, tag=1) for rank in others]
    works += [dist.isend(content(torch.float32, 2), rank, group=group, tag=2) for rank in others]
    works += [dist.irecv(got[rank][1], rank, group=group, tag=2) for rank in others]
    works += [dist.irecv(got[rank][0], rank, group=group, tag=1) for rank in others]
    for work in works:
        work.wait()
    found = torch.zeros(len(ranks))
    if dist.get_rank() == ranks[-1]:
        for _ in others:
            tensor = torch.zeros(1)
            sender = dist.recv(tensor, group=group, tag=3)
            found[ranks.index(sender)] = tensor
    else:
        dist.send(torch.tensor([float(dist.get_rank())]), ranks[-1], group=group, tag=3)
    return [one for rank in others for one in got[rank]] + [found]


def objects(group: Any) -> list[torch.Tensor]:
    ranks = dist.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, {"rank": dist.get_rank(), "text": "x" * dist.get_rank()}, group=group)
    said = [found if dist.get_rank() == ranks[0] else None]
    dist.broadcast_object_list(said, ranks[0], group=group)
    assert said[0] == found
    dist.barrier(group=group)
    return [torch.tensor([one["rank"], len(one["text"])]) for one in found]


def compare(hosts: str, folder: str) -> tuple[int, list[str]]:
    start(hosts, folder)
    number, wrong = 0, []
    for ranks in (list(range(len(hosts))), [0, 2]):
        ours, gloo = dist.new_group(ranks, backend="paceline"), dist.new_group(ranks, backend="gloo")
        if dist.get_rank() not in ranks:
            continue
        for name, case in (*reductions(), *moves()):
            number += 1
            try:
                mine, theirs = case(ours), case(gloo)
                if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
                    wrong.append(f"{name} {ranks}: {mine} {theirs}")
            except RuntimeError as error:
                wrong.append(f"{name} {ranks}: {error}")
    return number, wrong


@pytest.mark.parametrize("way", list(WAYS))
def test_operations_are_those_of_gloo(way: str, tmp_path: Path) -> None:
    with LocalJob(num_workers=3, num_servers=2) as job:
        results = job.run(compare, WAYS[way], str(tmp_path))
    assert [wrong for _, wrong in results] == [[], [], []]
    assert [number for number, _ in results] == [222, 111, 222]
