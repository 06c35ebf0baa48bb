"""Worker of the plan's benchmark: alike layers whose computation only waits, trained by DistributedOptimizer."""

import itertools
import json
import sys
import time

import torch

import paceline
from paceline.kvstore.dist import DistStore
from paceline.sim.lock_step import FORWARD


class Wait(torch.autograd.Function):
    """Returns its input; forward and backward take as long as a layer's computation."""

    @staticmethod
    def forward(ctx, values, weight, seconds):
        ctx.seconds, ctx.shape = seconds, weight.shape
        time.sleep(FORWARD * seconds)
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep((1 - FORWARD) * ctx.seconds)
        return grad, torch.zeros(ctx.shape), None


class Layer(torch.nn.Module):
    def __init__(self, numel, seconds):
        super().__init__()
        self.weight, self.seconds = torch.nn.Parameter(torch.zeros(numel)), seconds

    def forward(self, values):
        return Wait.apply(values, self.weight, self.seconds)


def main() -> None:
    layers, numel, compute_s, steps = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    store = paceline.kvstore.create("dist_sync")
    assert isinstance(store, DistStore)
    model = torch.nn.Sequential(*(Layer(numel, compute_s / layers) for _ in range(layers)))
    optimizer = paceline.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), store, model=model, batch_dim=0
    )
    begun = []
    for _ in range(steps + 3):
        begun.append(time.perf_counter())
        optimizer.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
    store.barrier()
    if store.rank == 0:
        print(json.dumps({"seconds": [after - before for before, after in itertools.pairwise(begun[2:])]}))


main()
