"""All-reduce in place of tensors that stay the same: by the Horovod interface, and by Gloo."""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import paceline.hvd as hvd
from benchmarks.shapes import shapes_of


def by_hvd(tensors: list[torch.Tensor]) -> None:
    handles = [hvd.allreduce_async_(tensor, name=f"t{n}", op=hvd.Sum) for n, tensor in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def by_gloo(tensors: list[torch.Tensor]) -> None:
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def main() -> None:
    how, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if how == "hvd":
        hvd.init()
        reduce, barrier, rank = by_hvd, hvd.barrier, hvd.rank()
    else:
        dist.init_process_group("gloo")
        reduce, barrier, rank = by_gloo, dist.barrier, dist.get_rank()
    tensors = [torch.zeros(shape) for shape in shapes_of(name)]
    times = []
    for _ in range(steps + 5):
        barrier()
        start = time.perf_counter()
        reduce(tensors)
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({"ms": statistics.median(times[5:]) * 1e3, "min_ms": min(times) * 1e3}), flush=True)
    if how == "gloo":
        # The end of a Gloo group holds the interpreter's lock and joins threads that may wait for it.
        dist.barrier()
        os._exit(0)


main()
