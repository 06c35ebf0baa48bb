"""``--benchmark 1``: how fast made-up images train, beside the speed without other workers, and what an epoch costs."""

from __future__ import annotations

import argparse
import copy
import json
import time

import torch

from common import fit, flags
from paceline.kvstore import KVStoreBase, create

#: Images of ImageNet's training set.
EPOCH = 1_281_167
#: Batches before the ones that are measured: connections, buffers and plans are made.
FIRST = 3


class MadeUp:
    """The same batch of random images again and again."""

    def __init__(self, args: argparse.Namespace, shape: tuple[int, int, int]) -> None:
        self.num_classes = args.num_classes or 1000
        self.batch = torch.randn(args.batch_size, *shape), torch.randint(self.num_classes, (args.batch_size,))
        self._batches = args.num_batches

    def __len__(self) -> int:
        return self._batches

    def train(self, epoch: int) -> list[fit.Batch]:
        return [self.batch] * self._batches

    def test(self) -> list[fit.Batch]:
        return []


def measure(args: argparse.Namespace, shape: tuple[int, int, int], store: KVStoreBase) -> None:
    """Print the speed of training, and write it where ``--result`` says."""
    data = MadeUp(args, shape)
    args.num_classes = data.num_classes
    local = copy.copy(args)
    local.kv_store, local.gc_type, local.monitor = "local", "none", 0
    store.barrier()
    alone, _ = images_per_s(local, shape, data, create("local"), max(1, args.num_batches // 4))
    mine, all_of_them = images_per_s(args, shape, data, store, args.num_batches)
    if store.rank == 0:
        found = figures(args, store, mine, all_of_them, alone * store.num_workers)
        fit.report(fit.Console(), "speed of training", found)
        if args.result:
            args.result.write_text(json.dumps(found, indent=2))
    store.close()


def images_per_s(
    args: argparse.Namespace, shape: tuple[int, int, int], data: MadeUp, store: KVStoreBase, batches: int
) -> tuple[float, float]:
    """Return the images per second of this worker, and those of all workers of a store."""
    training = fit.Training(args, flags.network(args, shape[-1]), data, store)
    for _ in range(FIRST):
        training.step(*data.batch)
    store.barrier()
    begun = time.perf_counter()
    for _ in range(batches):
        training.step(*data.batch)
    mine = batches * args.batch_size / (time.perf_counter() - begun)
    store.barrier()
    return mine, store.num_workers * batches * args.batch_size / (time.perf_counter() - begun)


def figures(
    args: argparse.Namespace, store: KVStoreBase, mine: float, total: float, ideal: float
) -> dict[str, str | float]:
    """Return what the benchmark found, in images per second, and what an epoch of ImageNet takes and costs."""
    found: dict[str, str | float] = {"network": args.network, "kv_store": store.type, "workers": store.num_workers}
    found |= {"images/s of worker 0": round(mine, 2), "images/s of all workers": round(total, 2)}
    found |= {"images/s without exchange": round(ideal, 2), "scaling efficiency": round(total / ideal, 3)}
    hours = EPOCH / total / 3600
    found["hours per epoch"] = round(hours, 3)
    if args.price_per_hour is not None:
        found["cost per epoch"] = round(hours * args.price_per_hour * store.num_workers, 2)
    return found
