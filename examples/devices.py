"""Several devices of one process: their names on the command line, and a network with a copy on each of them."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import paceline
from paceline import Context, gluon
from paceline.kvstore import KVStoreBase


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


class OnAll:
    """A network and its copies, trained together: a slice of each batch on each device.

    Attributes:
        replicas: the network and its copies.
        trainer: their optimizer.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStoreBase,
        args: argparse.Namespace,
        devices: list[Context],
    ) -> None:
        # paceline: the devices share the work of a step, and the weights of all of them start as rank 0's
        self.replicas = gluon.replicate(net, devices)
        settings = compression(args, devices)
        self.trainer = gluon.Trainer(self.replicas, optimizer, kvstore=store, compression_params=settings)
        self._devices = devices
        # Trainer.step divides by the batch size.
        self._loss = nn.CrossEntropyLoss(reduction="sum", label_smoothing=args.label_smoothing)

    def backward(self, images: torch.Tensor, labels: torch.Tensor) -> int:
        """Compute gradients of sums over samples; return how many samples those of the first device are sums of."""
        data = gluon.split_and_load(images, self._devices, even_split=False)
        wanted = gluon.split_and_load(labels, self._devices, even_split=False)
        losses = [self._loss(output, one) for output, one in zip(self.replicas(data), wanted, strict=True)]
        gluon.backward(losses)
        return len(wanted[0])
