"""Every optimizer of ``torch.optim``, some with a closure, one of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import Result, Run, Tensors
from tests.oracle.scripts.parts import CLASSES, FEATURES, labelled, loss_of, mlp

#: Each with options that its plain form does not have.
KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adadelta": partial(optim.Adadelta, lr=1.0, weight_decay=1e-3),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=1e-2),
    "adam": partial(optim.Adam, lr=1e-2, amsgrad=True),
    "adam_foreach": partial(optim.Adam, lr=1e-2, foreach=True),
    "adam_fused": partial(optim.Adam, lr=1e-2, fused=True),
    "adamax": partial(optim.Adamax, lr=1e-2),
    "adamw": partial(optim.AdamW, lr=1e-2, weight_decay=0.1, maximize=False),
    "asgd": partial(optim.ASGD, lr=0.1, t0=5.0),
    "nadam": partial(optim.NAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.01),
    "radam": partial(optim.RAdam, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "rprop": partial(optim.Rprop, lr=1e-2),
    "sgd": partial(optim.SGD, lr=0.2),
    "sgd_nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
}


def train_with(kind: str, run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(KINDS[kind](net.parameters()), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


for _kind in KINDS:
    script("equal", dtype=torch.float64, name=f"optimizer_{_kind}")(partial(train_with, _kind))


@script("equal", dtype=torch.float64)
def muon_beside_adamw(run: Run) -> Result:
    """Jordan et al. 2024: matrices by Muon, all else by AdamW."""
    net = mlp()
    matrices, rest = ([p for p in net.parameters() if (p.dim() == 2) == wanted] for wanted in (True, False))
    muon = run.distribute(optim.Muon(matrices, lr=0.02), net)
    adamw = run.distribute(optim.AdamW(rest, lr=1e-2), net)
    for inputs, targets in run.batches(labelled):
        net.zero_grad()
        loss_of(net, inputs, targets).backward()
        muon.step()
        adamw.step()
    return net


@script("refused at once", dtype=torch.float64)
def lbfgs(run: Run) -> Result:
    """Steps of fixed length: the loss itself is not looked at, gradients of several passes are."""
    net = nn.Linear(FEATURES, CLASSES)
    inner = optim.LBFGS(net.parameters(), lr=0.3, max_iter=3, history_size=3, tolerance_change=0.0)
    optimizer = run.distribute(inner, net)
    for inputs, targets in run.batches(labelled, 20):

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, inputs, targets) + 0.1 * net.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return net


@script("refused at once", dtype=torch.float64)
def lbfgs_with_line_search(run: Run) -> Result:
    """How far a step goes, and how many passes it takes, is decided by the loss."""
    net = nn.Linear(FEATURES, CLASSES)
    inner = optim.LBFGS(net.parameters(), max_iter=3, history_size=3, line_search_fn="strong_wolfe")
    optimizer = run.distribute(inner, net)
    for inputs, targets in run.batches(labelled, 20):

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, inputs, targets) + 0.1 * net.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return net


@script("equal", dtype=torch.float64)
def closure_of_sgd(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for inputs, targets in run.batches(labelled):

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, inputs, targets)
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
    return net


class Lion(optim.Optimizer):
    """Chen et al. 2023, as a user writes it: signs of a mean."""

    def __init__(self, params: Any, lr: float = 1e-3, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["decay"])
                param.add_(mean.lerp(param.grad, 0.1).sign(), alpha=-group["lr"])
                mean.lerp_(param.grad, 0.01)


@script("refused at once", dtype=torch.float64)
def own_optimizer(run: Run) -> Result:
    net = mlp()
    optimizer = run.distribute(Lion(net.parameters(), lr=3e-3, decay=0.1), net)
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
    return net


@script("equal", dtype=torch.float64)
def schedules(run: Run) -> Result:
    """Warm-up, a cycle of rate and momentum, and a plateau of something that all workers see alike."""
    net = mlp()
    inner = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = run.distribute(inner, net)
    cycle = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=15)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
    for step, (inputs, targets) in enumerate(run.batches(labelled)):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        if step < 14:
            cycle.step()
        else:
            plateau.step(net[2].bias.detach().norm())
    return {"net": net, "rate": optimizer.param_groups[0]["lr"]}


@script("equal", dtype=torch.float64)
def groups_with_their_own_rates(run: Run) -> Result:
    net = mlp()
    groups = [
        {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1},
        {"params": [net[0].bias, net[2].bias], "weight_decay": 0.0, "lr": 3e-2},
    ]
    optimizer = run.distribute(optim.AdamW(groups, lr=1e-2), net)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.95**step, lambda step: 1 / (1 + step)])
    for inputs, targets in run.batches(labelled):
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        optimizer.step()
        schedule.step()
    return net


# ---- sparse gradients ----------------------------------------------------------------------------------------------

ROWS = 40


class Words(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, 6, mode="mean", sparse=sparse)
        self.out = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words))


def texts(count: int, generator: torch.Generator) -> Tensors:
    words = torch.randint(ROWS, (count, 5), generator=generator)
    return words, words.sum(1) % 3


@script("equal", dtype=torch.float64)
def sparse_embedding_with_sgd(run: Run) -> Result:
    net = Words()
    optimizer = run.distribute(optim.SGD(net.parameters(), lr=0.3), net)
    for words, targets in run.batches(texts):
        optimizer.zero_grad()
        F.cross_entropy(net(words), targets).backward()
        optimizer.step()
    return net


@script("equal", dtype=torch.float64)
def sparse_adam_beside_sgd(run: Run) -> Result:
    """As recommenders do: rows by SparseAdam, which leaves absent rows alone, the rest by SGD."""
    net = Words()
    rows = run.distribute(optim.SparseAdam(list(net.words.parameters()), lr=1e-2), net)
    rest = run.distribute(optim.SGD(net.out.parameters(), lr=0.1, momentum=0.9), net)
    for words, targets in run.batches(texts):
        rows.zero_grad()
        rest.zero_grad()
        F.cross_entropy(net(words), targets).backward()
        rows.step()
        rest.step()
    return net


@script("equal", dtype=torch.float64)
def sparse_adagrad(run: Run) -> Result:
    net = nn.Sequential(nn.Embedding(ROWS, FEATURES, sparse=True), nn.Flatten(), nn.Linear(5 * FEATURES, 3))
    optimizer = run.distribute(optim.Adagrad(net.parameters(), lr=0.1), net)
    for words, targets in run.batches(texts):
        optimizer.zero_grad()
        F.cross_entropy(net(words), targets).backward()
        optimizer.step()
    return net
