"""The training loop: a plain PyTorch loop; the lines that paceline adds are marked ``# paceline:``."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import devices
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import paceline
from common.schedule import rate_factor
from paceline.kvstore import KVStoreBase

Batch = tuple[torch.Tensor, torch.Tensor]


class Data(Protocol):
    """Batches of this worker, and those of the test."""

    def train(self, epoch: int) -> Iterable[Batch]: ...

    def test(self) -> Iterable[Batch]: ...

    def __len__(self) -> int:
        """Return the number of training batches of an epoch."""


def open_store(args: argparse.Namespace) -> KVStoreBase:
    """Join the job."""
    options = {} if args.staleness is None else {"staleness": args.staleness}
    options |= devices.store_options(args.kv_store, devices.named(args))
    return paceline.kvstore.create(args.kv_store, **options)  # paceline: 1. join the job


def own_part(args: argparse.Namespace, count: int, store: KVStoreBase) -> paceline.data.ShardedSampler:
    """Return this worker's part of ``count`` samples: an equal one, or that of its line in ``data_sharding``."""
    if not args.data_allocator:
        return paceline.data.ShardedSampler(count, store.num_workers, store.rank, seed=args.seed)
    span = paceline.data.read_spans("data_sharding", store.num_workers)[store.rank]
    together = args.batch_size * store.num_workers
    return paceline.data.ShardedSampler(count, span=span, global_batch_size=together, seed=args.seed)


def fit(args: argparse.Namespace, net: nn.Module, data: Data, store: KVStoreBase) -> list[dict[str, float]]:
    """Train a network and return the figures of each epoch."""
    training = Training(args, net, data, store)
    first = training.resume()
    for epoch in range(first, args.num_epochs):
        training.epoch(epoch)
    return training.close()


class Training:
    """One run of a script: network, optimizer, schedule, checkpoints and reports."""

    def __init__(self, args: argparse.Namespace, net: nn.Module, data: Data, store: KVStoreBase) -> None:
        self.args, self.data, self.store = args, data, store
        self.where = devices.named(args)
        self.device = self.where[0].device
        self.net = net.to(self.device)
        self.optimizer = self._optimizer()
        factor = rate_factor(args, store.num_workers, max(1, len(data)))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        # float16 needs its losses scaled, so that small gradients are not lost; other types pass as they are.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.dtype == "float16")
        self.console = Console(quiet=store.rank != 0, highlight=False)
        self.figures: list[dict[str, float]] = []
        self.steps = 0
        self.step = self._step_on_all() if len(self.where) > 1 else self._step_on_one

    def _optimizer(self) -> Any:
        args, parameters = self.args, self.net.parameters()
        optimizer: torch.optim.Optimizer
        if args.optimizer == "adam":
            optimizer = torch.optim.Adam(parameters, lr=args.lr, weight_decay=args.wd)
        else:
            nesterov = args.optimizer == "nag"
            optimizer = torch.optim.SGD(
                parameters, lr=args.lr, momentum=args.mom, weight_decay=args.wd, nesterov=nesterov
            )
        if len(self.where) > 1:
            return optimizer
        # paceline: 2. the gradient becomes the mean over all workers' samples, the weights start as rank 0's
        compression = devices.compression(args, self.where)
        return paceline.DistributedOptimizer(optimizer, kvstore=self.store, model=self.net, compression=compression)

    def _step_on_one(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images, labels = images.to(self.device), labels.to(self.device)
        loss = self._loss(images, labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._monitor()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            outputs = self.net(images)
        return F.cross_entropy(outputs.float(), labels, label_smoothing=self.args.label_smoothing)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.args.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.args.dtype))

    def _step_on_all(self) -> Any:
        if self.args.dtype != "float32":
            raise SystemExit("--dtype float16 and bfloat16 train on one device per worker; start more workers instead")
        compression = devices.compression(self.args, self.where)
        return devices.step_on_all(self.net, self.optimizer, self.store, compression, self.where)

    def epoch(self, epoch: int) -> None:
        """Train on the batches of an epoch, test, and write a checkpoint."""
        self.net.train()
        begun, seen, last = time.perf_counter(), 0, time.perf_counter()
        for number, (images, labels) in enumerate(self.data.train(epoch), 1):
            self.step(images, labels)
            self.schedule.step()
            self.steps, seen = self.steps + 1, seen + len(labels)
            if self.args.disp_batches and number % self.args.disp_batches == 0:
                now = time.perf_counter()
                rate = self.args.disp_batches * len(labels) / (now - last)
                self.console.print(f"epoch {epoch} batch {number}/{len(self.data)}: {rate:.1f} samples/s per worker")
                last = now
        seconds = time.perf_counter() - begun
        self._report(epoch, seen / seconds, seconds)
        if self.args.model_prefix is not None:
            self._save(epoch + 1)

    def _report(self, epoch: int, rate: float, seconds: float) -> None:
        figures = {"epoch": epoch, "samples_per_s": round(rate, 1), "seconds": round(seconds, 3)}
        if self.store.rank == 0:
            figures |= self.accuracy()
            shown = ", ".join(
                f"{name} {value:.4f}" for name, value in figures.items() if name.startswith(("top", "loss"))
            )
            self.console.print(f"epoch {epoch}: {rate:.1f} samples/s per worker, {shown}")
        self.figures.append(figures)

    @torch.no_grad()
    def accuracy(self) -> dict[str, float]:
        """Return loss and accuracy of the test samples."""
        self.net.eval()
        right, total, loss = {1: 0, self.args.top_k or 1: 0}, 0, 0.0
        for images, labels in self.data.test():
            outputs, wanted = self.net(images.to(self.device)).float(), labels.to(self.device)
            best = outputs.topk(min(max(right), outputs.shape[1]), 1).indices == wanted[:, None]
            for k in right:
                right[k] += int(best[:, :k].sum())
            loss += float(F.cross_entropy(outputs, wanted, reduction="sum"))
            total += len(labels)
        return {"loss": loss / total} | {f"top-{k}": count / total for k, count in right.items()}

    def _monitor(self) -> None:
        if self.args.monitor and self.steps % self.args.monitor == 0:
            for name, parameter in self.net.named_parameters():
                if parameter.grad is not None:
                    size = parameter.grad.abs().mean()
                    self.console.print(f"step {self.steps} {name}: mean |gradient| {size:.3g}")

    # ---- checkpoints ----

    def _path(self, epoch: int) -> Path:
        prefix: Path = self.args.model_prefix
        return prefix.with_name(f"{prefix.name}-{epoch:04d}.ckpt")

    def _save(self, epoch: int) -> None:
        extra = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}
        paceline.save(self._path(epoch), self.net, self.optimizer, step=self.steps, extra=extra)

    def resume(self) -> int:
        """Go on from a checkpoint, if one is asked for; return the first epoch that is still to be trained."""
        epoch = self.args.load_epoch
        if self.args.model_prefix is None and (epoch is not None or self.args.retrain or self.args.savemodel):
            raise SystemExit("checkpoints need --model-prefix: where they are")
        if epoch is None and self.args.retrain:
            folder = self.args.model_prefix.parent
            found = sorted(folder.glob(f"{self.args.model_prefix.name}-[0-9][0-9][0-9][0-9].ckpt"))
            epoch = int(found[-1].stem.rpartition("-")[2]) if found else None
        if epoch is None:
            return 0
        self.steps, extra = paceline.load(self._path(epoch), self.net, self.optimizer)
        self.schedule.load_state_dict(extra["schedule"])
        self.scaler.load_state_dict(extra["scaler"])
        self.console.print(f"goes on after epoch {epoch}, step {self.steps}")
        return int(epoch)

    def close(self) -> list[dict[str, float]]:
        """Leave the job; rank 0 writes the figures."""
        self.store.barrier()
        if self.args.result and self.store.rank == 0:
            about = {"network": self.args.network, "kv_store": self.store.type, "num_workers": self.store.num_workers}
            self.args.result.write_text(json.dumps(about | {"epochs": self.figures}, indent=2))
        self.store.close()  # paceline: 3. leave the job
        return self.figures
