"""The worker of ``tests.observe.matrix``: a training script that is slow in one part, from a round on."""

from __future__ import annotations

import gc
import mmap
import os
import random
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The slow one of the workers, and the round in which its fault begins.
WORKERS, SLOW, ONSET = 4, 1, 30

#: Rounds after the onset.
AFTER = 60

#: Keys of the unbalanced placement, and sides of each; one server has all of them. Muon's matrix products take some
#: 0.15 s of its processor in a round.
LARGE_KEYS, LARGE_SIDE = 4, 640

#: Samples of a worker in a round; with measured shares, of the mean worker.
BATCH = 8

#: Options of each kind of store, and settings of its job.
STORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dist_sync": ({}, {}),
    "dist_ssync": ({"staleness": 4}, {}),
    "dist_gsync": ({}, {"groups": "0 1; 2 3;"}),
}


class FaultyLoop:
    """A model, its data and its loss. The slow worker has its fault from :data:`ONSET` on, or it comes from outside.

    Args:
        fault: name of the fault.
        jitter: standard deviation of the logarithm of a round's time.
        rank: rank of this worker.
        folder: it writes there how far it is.
        compute_s: time on a processor of a round.

    Attributes:
        model: to be trained.
    """

    def __init__(self, fault: str, jitter: float, rank: int, folder: str, compute_s: float) -> None:
        import torch

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

        class Large(torch.nn.Module):
            """Parameters that ``placement="hash"`` gives to the first of two servers."""

            def __init__(self) -> None:
                super().__init__()
                even = [name for name in map("p{}".format, range(99)) if zlib.crc32(f"2.{name}".encode()) % 2 == 0]
                for name in even[:LARGE_KEYS]:
                    self.register_parameter(name, torch.nn.Parameter(torch.zeros(LARGE_SIDE, LARGE_SIDE)))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + sum(one.mean() for one in self.parameters())

        self.fault, self._is_slow, self._compute_s, self._jitter = fault, rank == SLOW, compute_s, jitter
        self._burn, self._pause, self._number = Burn(), Pause.apply, 0
        large = [Large()] if fault == "placement" else []
        layers = [self._burn, torch.nn.Linear(256, 256, bias=not large), *large]
        self.model = torch.nn.Sequential(*layers)
        self._chance, self._longer = random.Random(f"{rank} {fault} {jitter}"), 1.0
        self._table = mapped(Path(folder, "data")) if fault == "memory" and self._is_slow else None
        if fault == "gc" and self._is_slow:
            gc.callbacks.append(
                lambda phase, info: time.sleep(0.1) if phase == "start" and info["generation"] == 2 else None
            )
        self._progress = os.open(Path(folder, f"round-{rank}"), os.O_CREAT | os.O_WRONLY)

    @property
    def _has_fault(self) -> bool:
        return self._is_slow and self._number >= ONSET

    def load(self, samples: Sequence[int]) -> Any:
        """Return a batch."""
        import torch

        time.sleep(0.15 if self._has_fault and self.fault == "loader" else 0.002)
        return torch.ones(len(samples), 256)

    def begin(self, batch: Any) -> None:
        """Begin a round."""
        os.pwrite(self._progress, f"{self._number:9}".encode(), 0)
        self._longer = self._chance.lognormvariate(0, self._jitter) if self._jitter else 1.0
        self._burn.seconds = self._compute_s * self._longer * len(batch) / BATCH
        if self._table is not None:
            sum(self._table[at] for at in range(0, len(self._table), 4096))

    def loss(self, model: Any, batch: Any) -> Any:
        """Return the loss; its backward takes a while."""
        extra = 0.2 if self._has_fault and self.fault == "backward" else 0.0
        return self._pause(model(batch), 0.05 * self._longer + extra).sum()

    def end(self) -> None:
        """End a round."""
        if self.fault == "gc" and self._has_fault and self._number % 10 == 0:
            gc.collect()
        self._number += 1


def train(fault: str, jitter: float, rounds: int, folder: str, compute_s: float, kind: str, shares: bool) -> None:
    """Train with a store."""
    import torch

    import paceline

    store = paceline.kvstore.create(kind, **STORES[kind][0])
    loop = FaultyLoop(fault, jitter, store.rank, folder, compute_s)
    kind_of = torch.optim.Muon if fault == "placement" else torch.optim.SGD
    own = kind_of(loop.model.parameters(), lr=1e-6)
    update = "server" if fault == "placement" else None  # the servers have most to do
    optimizer = paceline.DistributedOptimizer(own, kvstore=store, model=loop.model, update=update)
    data: Any = range(rounds * BATCH * (WORKERS if shares else 1))
    batches: dict[str, Any] = {"batch_size": BATCH}
    if shares:
        sampler = paceline.data.SharedBatchSampler(data, store, global_batch_size=WORKERS * BATCH, shares="measured")
        batches = {"batch_sampler": sampler}
    for batch in torch.utils.data.DataLoader(data, collate_fn=loop.load, **batches):
        loop.begin(batch)
        optimizer.zero_grad()
        loop.loss(loop.model, batch).backward()
        optimizer.step()
        loop.end()


def rounds_of(folder: Path) -> int:
    """Return the last round of the slow worker: others may be further, where they do not wait for it."""
    path = folder / f"round-{SLOW}"
    return int(path.read_text().strip() or -1) if path.exists() else -1


def quota(compute_s: float) -> float:
    """Return half of the processor that a worker needs."""
    return 0.5 * compute_s / (compute_s + 0.055)


def mapped(path: Path, size: int = 64 << 20) -> mmap.mmap:
    """Return a file in memory, which the kernel may take away and read again."""
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
