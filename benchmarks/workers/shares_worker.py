"""Worker of the benchmark of shares: its gradients are complete when those of its machine would be."""

import json
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.config import from_environment


class Until(torch.autograd.Function):
    """A loss whose gradients are complete when the time has come that the class attribute says.

    It computes nothing: six workers share two cores, and what one of them computes would delay the others.
    """

    end = 0.0

    @staticmethod
    def forward(ctx, *parameters):
        ctx.save_for_backward(*parameters)
        return torch.zeros(())

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(max(0.0, Until.end - time.monotonic()))
        return ctx.saved_tensors


class Machine(torch.nn.Module):
    """A linear layer whose forward and backward pass take as long as they would on another machine."""

    def __init__(self, elements):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(elements // 8, 8) * 0.01)
        self.bias = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return Until.apply(self.weight, self.bias)


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    store = paceline.kvstore.create(task["store_type"])
    model = Machine(task["elements"])
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    sampler, x = sampler_of(task, store), torch.randn(4096, task["elements"] // 8)
    epochs = []
    for slower in task["slower"]:
        seconds, steps = task["seconds"][store.rank] * slower[store.rank], []
        for indices in sampler:
            begun = time.monotonic()
            computes_s = seconds * (task["fixed"] + (1 - task["fixed"]) * len(indices) / task["batch"])
            Until.end = begun + computes_s
            model(x[: len(indices)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append((begun, time.monotonic(), len(indices), computes_s))
        epochs.append(steps)
    if not from_environment().profile:
        Path(task["folder"], f"{store.rank}.json").write_text(json.dumps(epochs))


def sampler_of(task, store):
    """Return the batches of a way to give work to the workers."""
    if task["shares"] == "chosen":
        return paceline.data.batch_sampler(task["length"], store, batch_size=task["batch"])
    total = task["batch"] * store.num_workers
    return paceline.data.SharedBatchSampler(task["length"], store, global_batch_size=total, shares=task["shares"])


main()
