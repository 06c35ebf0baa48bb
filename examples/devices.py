"""Several devices of one process: their names on the command line, and a step that trains on all of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline
from paceline import Context, gluon
from paceline.kvstore import KVStoreBase

Step = Callable[[torch.Tensor, torch.Tensor], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", help="numbers of this worker's GPUs: 0,2")
    cpus = {"type": int, "choices": range(1, 9), "metavar": "NUMBER", "default": 1}
    where.add_argument("--cpus", **cpus, help="how many logical CPU devices this worker has (1)")


def named(args: argparse.Namespace) -> list[Context]:
    if args.gpus:
        numbers, there = [int(number) for number in args.gpus.split(",")], torch.cuda.device_count()
        if max(numbers) >= there:
            raise SystemExit(f"--gpus {args.gpus}: torch finds {there} GPUs here; --cpus 1 trains without any")
        return [paceline.gpu(number) for number in numbers]
    return [paceline.cpu(number) for number in range(args.cpus)]


def store_options(kv_store: str, devices: list[Context]) -> dict[str, Any]:
    """Return store options that make merged gradients means over samples, as ``DistributedOptimizer`` does."""
    return {"mean": True} if len(devices) > 1 and kv_store.startswith("dist") else {}


def compression(args: argparse.Namespace, devices: list[Context]) -> dict[str, Any] | None:
    """Return the settings of gradient compression, with a threshold that means the same in every store.

    Stores of one process compress sums over the samples of a slice, not means.
    """
    if args.gc_type == "none":
        return None
    sums = len(devices) > 1 and not args.kv_store.startswith("dist")
    return {"type": args.gc_type, "threshold": args.gc_threshold * (args.batch_size / len(devices) if sums else 1)}


def step_on_all(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    store: KVStoreBase,
    compression: dict[str, Any] | None,
    devices: list[Context],
) -> Step:
    """Return a function that trains ``net`` and its copies on one batch, a slice on each device."""
    # paceline: the devices share the work of a step, and the weights of all of them start as those of rank 0's first
    replicas = gluon.replicate(net, devices)
    trainer = gluon.Trainer(replicas, optimizer, kvstore=store, compression_params=compression)
    loss = nn.CrossEntropyLoss(reduction="sum")  # Trainer.step divides by the batch size

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        data = gluon.split_and_load(images, devices, even_split=False)
        wanted = gluon.split_and_load(labels, devices, even_split=False)
        gluon.backward([loss(output, one) for output, one in zip(replicas(data), wanted, strict=True)])
        trainer.step(len(labels))

    return step
