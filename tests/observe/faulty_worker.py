"""The worker of ``tests.observe.matrix``: a training script that is slow in one part, from a round on."""

from __future__ import annotations

import gc
import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The slow one of the workers, and the round in which its fault begins.
WORKERS, SLOW, ONSET = 4, 1, 30

#: Samples of a worker in a round; with measured shares, of the mean worker.
BATCH = 8

#: Options of each kind of store, and settings of its job.
STORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dist_sync": ({}, {}),
    "dist_ssync": ({"staleness": 4}, {}),
    "dist_gsync": ({}, {"groups": "0 1; 2 3;"}),
}


def train(fault: str, jitter: float, rounds: int, folder: str, compute_s: float, kind: str, shares: bool) -> None:
    """Train; the slow worker has its fault from :data:`ONSET` on, unless it comes from outside."""
    import torch

    import paceline

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(ctx.seconds)
            return grad, None

    class Burn(torch.nn.Module):
        seconds = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                x @ torch.ones(256, 256)
            return x

    number = 0

    def load(samples: Sequence[int]) -> torch.Tensor:
        time.sleep(0.15 if is_slow and fault == "loader" and number >= ONSET else 0.002)
        return torch.ones(len(samples), 256)

    store = paceline.kvstore.create(kind, **STORES[kind][0])
    is_slow = store.rank == SLOW
    burn = Burn()
    model = torch.nn.Sequential(burn, torch.nn.Linear(256, 256))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), kvstore=store, model=model)
    chance = random.Random(f"{store.rank} {fault} {jitter}")
    table = mapped(Path(folder, "data")) if fault == "memory" and is_slow else None
    if fault == "gc" and is_slow:
        gc.callbacks.append(
            lambda phase, info: time.sleep(0.1) if phase == "start" and info["generation"] == 2 else None
        )
    progress = os.open(Path(folder, f"round-{store.rank}"), os.O_CREAT | os.O_WRONLY)
    data: Any = range(rounds * BATCH * (WORKERS if shares else 1))
    batches: dict[str, Any] = {"batch_size": BATCH}
    if shares:
        sampler = paceline.data.SharedBatchSampler(data, store, global_batch_size=WORKERS * BATCH, shares="measured")
        batches = {"batch_sampler": sampler}
    for batch in torch.utils.data.DataLoader(data, collate_fn=load, **batches):
        os.pwrite(progress, f"{number:9}".encode(), 0)
        longer = chance.lognormvariate(0, jitter) if jitter else 1.0
        burn.seconds = compute_s * longer * len(batch) / BATCH
        if table is not None:
            sum(table[at] for at in range(0, len(table), 4096))
        optimizer.zero_grad()
        extra = 0.2 if fault == "backward" and is_slow and number >= ONSET else 0.0
        Pause.apply(model(batch), 0.05 * longer + extra).sum().backward()
        optimizer.step()
        if fault == "gc" and is_slow and number >= ONSET and number % 10 == 0:
            gc.collect()
        number += 1


def mapped(path: Path, size: int = 64 << 20) -> mmap.mmap:
    """Return a file in memory, which the kernel may take away and read again."""
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
