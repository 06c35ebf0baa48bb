"""Batch normalisation: every worker normalises by its own batch, and all keep rank 0's means, as in DDP."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import Result, Run, sizes
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, mlp

PROBE = torch.linspace(-2, 2, 3 * FEATURES, dtype=torch.float64).view(3, FEATURES)


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, CLASSES))


def seen_of(net: nn.Sequential) -> Result:
    """Return what an evaluation sees: weights, means, and what comes out."""
    norm = net.eval()[1]
    with torch.no_grad():
        outputs = net(PROBE.to(norm.weight.device))
    return {"net": net, "mean": norm.running_mean, "variance": norm.running_var, "outputs": outputs,
            "saved": dict(net.state_dict())}  # fmt: skip


def by_parts(run: Run) -> Result:
    """One process that computes the loss of every worker's part by itself; only rank 0's part moves the means."""
    net = normalised()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        parts = sizes(step, run.workers)
        for rank, (own, wanted) in enumerate(zip(inputs.split(parts), targets.split(parts), strict=True)):
            means = copy.deepcopy(net[1].state_dict())
            (F.cross_entropy(net(own), wanted) * (parts[rank] / sum(parts))).backward()
            if rank > 0:
                with torch.no_grad():
                    net[1].running_mean.copy_(means["running_mean"])
                    net[1].running_var.copy_(means["running_var"])
                    net[1].num_batches_tracked.copy_(means["num_batches_tracked"])
        optimizer.step()
    return seen_of(net)


@script("equal", dtype=torch.float64, alone=by_parts)
def batch_norm(run: Run) -> Result:
    net = normalised()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return seen_of(net)


@script("equal", dtype=torch.float64, alone=by_parts)
def batch_norm_evaluated_often(run: Run) -> Result:
    net = normalised()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        if step % 10 == 9:
            seen_of(net)
            net.train()
    return seen_of(net)


class Seeded(nn.Module):
    """Has buffers and frozen parameters of dtypes that no store holds, drawn by each process for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("seeds", torch.randint(-(2**63), 2**63 - 1, (5,)))
        self.register_buffer("bytes", torch.randint(256, (5,), dtype=torch.uint8))
        self.register_buffer("flags", torch.rand(5) < 0.5)
        self.register_buffer("small", torch.randn(5).to(torch.float8_e4m3fn))
        self.hashes = nn.Parameter(torch.randint(-(2**63), 2**63 - 1, (3,)), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


@script("equal")
def buffers_of_odd_dtypes(run: Run) -> Result:
    net = Seeded()
    optimizer = run.distribute(torch.optim.SGD(net.net.parameters(), lr=0.1), net)
    for inputs, targets in run.batches(labelled, 5):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    halves = [part for one in (net.seeds, net.hashes.data) for part in (one >> 32, one & 255)]
    return [net, *halves, net.bytes, net.flags, net.small.float()]


def evaluated(net: nn.Sequential) -> Result:
    """Return the means and outputs of an evaluation, which depend on nothing but what the loop has put into the net."""
    norm = net.eval()[1]
    with torch.no_grad():
        return [net(PROBE.to(norm.weight.device)), norm.running_mean, norm.running_var]


@script("equal", dtype=torch.float64)
def batch_norm_of_earlier_weights(run: Run) -> Result:
    """The best weights are loaded after the last step, and evaluated."""
    net = normalised()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1), net)
    best = copy.deepcopy(net.state_dict())
    for inputs, targets in run.batches(labelled, 5):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    net.load_state_dict(best)
    return evaluated(net)


@script("equal", dtype=torch.float64)
def batch_norm_computed_anew(run: Run) -> Result:
    """Means over the same data on all workers, without gradients, take the place of those of training."""
    net = normalised()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.0), net)
    for inputs, targets in run.batches(labelled, 5):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    torch.optim.swa_utils.update_bn([PROBE.to(net[1].weight.device), 2 * PROBE.to(net[1].weight.device)], net)
    return evaluated(net)
