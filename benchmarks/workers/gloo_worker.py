"""The all-reduce way: Gloo sums the gradients, every process runs the optimizer."""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.shapes import shapes_of


def main() -> None:
    shapes_name, optimizer, _, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    dist.init_process_group("gloo")
    numel = sum(torch.Size(shape).numel() for shape in shapes_of(shapes_name))
    weight = torch.nn.Parameter(torch.randn(numel) * 0.01)
    weight.grad = torch.randn(numel) * 0.01
    sgd = torch.optim.SGD([weight], lr=0.01, momentum=0.9, fused=True)
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        dist.all_reduce(weight.grad)
        if optimizer == "sgd":
            sgd.step()
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps({"ms": statistics.median(times[3:]) * 1e3, "min_ms": min(times) * 1e3}), flush=True)
    dist.destroy_process_group()


main()
