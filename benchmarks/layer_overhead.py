"""Overhead of paceline's layers in one process that exchanges no gradients: LeNet on one device.

    python -m benchmarks.layer_overhead

A plain PyTorch loop, ``gluon`` (``replicate`` on one device and ``Trainer`` with the ``device`` store) and
``DistributedOptimizer`` with the ``local`` store train the same network in one process and take turns, a few steps
each. Every ratio is the median of the ratios within one turn, so that a drift of the machine's speed affects all alike.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import paceline
from examples.models import NETWORKS
from paceline import gluon

Step = Callable[[], None]
SGD = {"lr": 0.01, "momentum": 0.9}


def plain(network: str, images: torch.Tensor, labels: torch.Tensor, fused: bool = False) -> Step:
    """Return a training step in PyTorch alone."""
    net = NETWORKS[network]()
    optimizer = torch.optim.SGD(net.parameters(), **SGD, fused=fused or None)

    def step() -> None:
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def replicated(network: str, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """Return a training step of the gluon layer."""
    devices = [paceline.cpu()]
    net = gluon.replicate(NETWORKS[network](), devices)
    trainer = gluon.Trainer(net, "sgd", SGD, kvstore="device")

    def step() -> None:
        data, label = gluon.split_and_load(images, devices), gluon.split_and_load(labels, devices)
        losses = [F.cross_entropy(out, one, reduction="sum") for out, one in zip(net(data), label, strict=True)]
        gluon.backward(losses)
        trainer.step(len(labels))

    return step


def wrapped(network: str, images: torch.Tensor, labels: torch.Tensor, fused: bool = False) -> Step:
    """Return a training step whose optimizer is wrapped."""
    net = NETWORKS[network]()
    inner = torch.optim.SGD(net.parameters(), **SGD, fused=fused or None)
    optimizer = paceline.DistributedOptimizer(inner, kvstore="local", model=net)

    def step() -> None:
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTENDERS: dict[str, Callable[[str, torch.Tensor, torch.Tensor], Step]] = {
    "PyTorch": plain,
    "gluon, device store": replicated,
    "DistributedOptimizer, local store": wrapped,
    # gluon uses torch's fused kernels, so a fair comparison is a loop that uses them too.
    "PyTorch, fused": partial(plain, fused=True),
    "DistributedOptimizer, local store, fused": partial(wrapped, fused=True),
}


def measure(network: str, batch_size: int, steps: int, turns: int) -> dict[str, list[float]]:
    """Return seconds per step of each contender, one figure per turn."""
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
    contenders = {name: make(network, images, labels) for name, make in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name in random.sample(list(contenders), len(contenders)):
            taken = _timed(contenders[name], steps)
            if turn:  # the first turn includes allocations and the like
                seconds[name].append(taken)
    return seconds


def _timed(step: Step, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def overhead(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over turns of how much longer a contender takes than another, as a fraction."""
    return statistics.median(one / other for one, other in zip(seconds[name], seconds[base], strict=True)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="lenet", choices=["lenet", "mlp"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="steps of a contender in one turn (3)")
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(args.network, args.batch_size, args.steps, args.turns)
    table = Table(title=f"{args.network}, batch {args.batch_size}, one CPU thread")
    bases = ["PyTorch", "PyTorch, fused"]
    for column in ("", "ms per step", *(f"over {base}" for base in bases)):
        table.add_column(column, justify="right" if column else "left")
    ratios = {name: [overhead(seconds, name, base) for base in bases] for name in seconds}
    for name, times in seconds.items():
        table.add_row(name, f"{statistics.median(times) * 1e3:.2f}", *(f"{ratio:+.1%}" for ratio in ratios[name]))
    Console(width=100).print(table)
    milliseconds = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    print(json.dumps({"work": vars(args), "ms": milliseconds, "overhead": ratios}))


if __name__ == "__main__":
    main()
