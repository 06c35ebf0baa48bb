"""Where samples are seen: batches that come by keyword, nested, or with time first."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import Result, Run, Tensors
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, mlp


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.net(inputs)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


@script("equal")
def keyword_inputs(run: Run) -> Result:
    net = ByKeyword()
    optimizer = run.distribute(sgd(net), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        net(inputs=inputs, labels=targets).loss.backward()
        optimizer.step()
    return net


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: dict[str, list[torch.Tensor]], factor: float = 1.0) -> torch.Tensor:
        left, right = batch["halves"]
        return self.net(torch.cat([left, right], 1)) * factor


@script("equal")
def nested_inputs(run: Run) -> Result:
    net = Nested()
    optimizer = run.distribute(sgd(net), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        outputs = net({"halves": [inputs[:, : FEATURES // 2], inputs[:, FEATURES // 2 :]]}, factor=2.0)
        F.cross_entropy(outputs, targets).backward()
        optimizer.step()
    return net


LENGTH = 7


def time_first(count: int, generator: torch.Generator) -> Tensors:
    sequence = torch.randn(LENGTH, count, FEATURES, generator=generator)
    return sequence, sequence.mean(0)[:, :CLASSES].argmax(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.classes = nn.LSTM(FEATURES, 10, num_layers=2), nn.Linear(10, CLASSES)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.classes(self.recurrent(sequence)[0][-1])


@script("equal", dtype=torch.float64)
def time_first_inputs(run: Run) -> Result:
    net = Recurrent()
    optimizer = run.distribute(torch.optim.Adam(net.parameters(), lr=1e-2), net, batch_dim=1)
    for sequence, targets in run.batches(time_first, dim={0: 1, 1: 0}):
        optimizer.zero_grad()
        F.cross_entropy(net(sequence), targets).backward()
        optimizer.step()
    return net


@script("equal")
def samples_by_hand(run: Run) -> Result:
    """Without ``model=`` the user says how much a batch weighs."""
    net = mlp()
    optimizer = run.distribute(sgd(net), None)
    for inputs, targets in run.batches(labelled):
        if not run.joined:
            optimizer.samples = len(inputs)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net


@script("equal")
def summed_losses(run: Run) -> Result:
    """Losses are sums over samples, and gradients are summed over workers."""
    net = mlp()
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = run.distribute(inner, net, reduction="sum")
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets, reduction="sum").backward()
        optimizer.step()
    return net
