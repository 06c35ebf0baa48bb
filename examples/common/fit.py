"""The training loop: a plain PyTorch loop; the lines that paceline adds are marked ``# paceline:``."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import devices
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import paceline
from common import flags
from common.schedule import rate_factor
from paceline.kvstore import KVStoreBase

Batch = tuple[torch.Tensor, torch.Tensor]


class Data(Protocol):
    """Batches of this worker, and those of the test."""

    num_classes: int

    def train(self, epoch: int) -> Iterable[Batch]: ...

    def test(self) -> Iterable[Batch]: ...

    def __len__(self) -> int:
        """Return the number of training batches of an epoch."""


def open_store(args: argparse.Namespace) -> KVStoreBase:
    """Join the job."""
    options = {} if args.staleness is None else {"staleness": args.staleness}
    options |= devices.store_options(args.kv_store, devices.named(args))
    try:
        return paceline.kvstore.create(args.kv_store, **options)  # paceline: 1. join the job
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--kv-store {args.kv_store}: {error}") from error


def own_part(args: argparse.Namespace, count: int, store: KVStoreBase) -> paceline.data.ShardedSampler:
    """Return this worker's part of every batch of all workers: an equal one, or that of its line in ``data_sharding``.

    The batches of all workers together are those of one process with the joined batch, and all of them are full: the
    last one of an epoch is filled from its beginning.
    """
    together = args.batch_size * store.num_workers
    options: dict[str, Any] = {"global_batch_size": together, "seed": args.seed}
    if args.data_allocator:
        span = paceline.data.read_spans("data_sharding", store.num_workers)[store.rank]
        return paceline.data.ShardedSampler(count, span=span, **options)
    return paceline.data.ShardedSampler(count, store.num_workers, store.rank, **options)


def run(
    args: argparse.Namespace, shape: tuple[int, int, int], open_data: Callable[[KVStoreBase], Data]
) -> Training | None:
    """Do what the command line says: train on a data set, or measure how fast made-up images train.

    Args:
        args: of the command line.
        shape: channels, height and width of the images.
        open_data: returns the data of a worker of a store.
    """
    torch.manual_seed(args.seed)
    store = open_store(args)
    if args.benchmark:
        from common import benchmark  # it measures the loop of this module

        benchmark.measure(args, shape, store)
        return None
    data = open_data(store)
    args.num_classes = args.num_classes or data.num_classes
    training = Training(args, flags.network(args, shape[-1]), data, store)
    for epoch in range(training.resume(), args.num_epochs):
        training.epoch(epoch)
    training.close()
    return training


class Training:
    """One run of a script: network, optimizer, schedule, checkpoints and reports.

    Attributes:
        net: the network on the first device.
        figures: what was reported, an entry for each epoch.
    """

    def __init__(self, args: argparse.Namespace, net: nn.Module, data: Data, store: KVStoreBase) -> None:
        self.args, self.data, self.store = args, data, store
        where = devices.named(args)
        self.where, self.device = ", ".join(map(str, where)), where[0].device
        self.net = net.to(self.device)
        self.optimizer: Any = self._optimizer()
        self.on_all = None
        if len(where) > 1:
            if args.dtype != "float32":
                raise SystemExit(f"--dtype {args.dtype} trains on one device per worker; start more workers instead")
            self.on_all = devices.OnAll(net, self.optimizer, store, args, where)
        else:
            # paceline: 2. the gradient becomes the mean over all workers' samples, the weights start as rank 0's
            compression = devices.compression(args, where)
            self.optimizer = paceline.DistributedOptimizer(
                self.optimizer, kvstore=store, model=net, compression=compression
            )
        factor = rate_factor(args, store.num_workers, max(1, len(data)))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        # float16 needs its losses scaled, so that small gradients are not lost; other types pass as they are.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.dtype == "float16")
        self.console = Console(quiet=store.rank != 0, highlight=False)
        for text in args.notices:
            self.console.print(text, soft_wrap=True)
        self.figures: list[dict[str, float]] = []
        self.steps = self.seen = 0
        self.seconds = 0.0

    def _optimizer(self) -> torch.optim.Optimizer:
        args, parameters = self.args, self.net.parameters()
        if args.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=args.lr, weight_decay=args.wd)
        nesterov = args.optimizer == "nag"
        return torch.optim.SGD(parameters, lr=args.lr, momentum=args.mom, weight_decay=args.wd, nesterov=nesterov)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch."""
        if self.on_all is not None:
            self._monitor(self.on_all.backward(images, labels))
            self.on_all.trainer.step(len(labels))
            return
        images, labels = images.to(self.device), labels.to(self.device)
        with self._autocast():
            outputs = self.net(images)
        loss = F.cross_entropy(outputs.float(), labels, label_smoothing=self.args.label_smoothing)
        self.scaler.scale(loss).backward()
        self._monitor(self.scaler.get_scale())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.args.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.args.dtype))

    def _monitor(self, factor: float) -> None:
        """Print how large gradients are that are ``factor`` times those of the mean loss."""
        if not self.args.monitor or self.steps % self.args.monitor:
            return
        for name, parameter in self.net.named_parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs().mean() / factor
                self.console.print(f"step {self.steps} {name}: mean |gradient| {size:.3g}")

    def epoch(self, epoch: int) -> None:
        """Train on the batches of an epoch, test, and write a checkpoint."""
        self.net.train()
        seen, begun = 0, time.perf_counter()
        last = begun
        for number, (images, labels) in enumerate(self.data.train(epoch), 1):
            self.step(images, labels)
            self.schedule.step()
            self.steps, seen = self.steps + 1, seen + len(labels)
            paceline.report(step=self.steps, total=self.args.num_epochs * len(self.data))
            if self.args.disp_batches and number % self.args.disp_batches == 0:
                now = time.perf_counter()
                rate = self.args.disp_batches * len(labels) / (now - last)
                self.console.print(f"epoch {epoch} batch {number}/{len(self.data)}: {rate:.1f} samples/s per worker")
                last = now
        seconds = time.perf_counter() - begun
        self.seen, self.seconds = self.seen + seen, self.seconds + seconds
        self._report(epoch, seen / seconds, seconds)
        if self.args.model_prefix is not None:
            self._save(epoch + 1)

    def _report(self, epoch: int, rate: float, seconds: float) -> None:
        figures = {"epoch": epoch, "samples_per_s": round(rate, 1), "seconds": round(seconds, 3)}
        if self.store.rank == 0:
            tested = self.accuracy()
            shown = ", ".join(f"{name} {value:.4f}" for name, value in tested.items()).replace("top-1", "accuracy")
            self.console.print(f"epoch {epoch}: {rate:.0f} samples/s per worker, {shown}")
            figures |= tested
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

    # ---- checkpoints ----

    def _path(self, epoch: int) -> Path:
        prefix: Path = self.args.model_prefix
        return prefix.with_name(f"{prefix.name}-{epoch:04d}.ckpt")

    def _saved(self) -> tuple[Any, Any]:
        """Return the objects that hold weights and the optimizer's state."""
        return (self.net, self.optimizer) if self.on_all is None else (self.on_all.replicas, self.on_all.trainer)

    def _save(self, epoch: int) -> None:
        path, extra = self._path(epoch), {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}
        path.parent.mkdir(parents=True, exist_ok=True)
        paceline.save(path, *self._saved(), step=self.steps, extra=extra)
        self.console.print(f"wrote {path}", soft_wrap=True)

    def resume(self) -> int:
        """Go on from a checkpoint, if one is asked for; return the first epoch that is still to be trained."""
        epoch = self.args.load_epoch
        if epoch is None and self.args.retrain:
            prefix: Path = self.args.model_prefix
            found = sorted(prefix.parent.glob(f"{prefix.name}-[0-9][0-9][0-9][0-9].ckpt"))
            epoch = int(found[-1].stem.rpartition("-")[2]) if found else None
            if epoch is None:
                self.console.print(f"there is no {self._path(1)} or later: training starts from the beginning")
        if epoch is None:
            return 0
        self.steps, extra = paceline.load(self._path(epoch), *self._saved())
        self.schedule.load_state_dict(extra["schedule"])
        self.scaler.load_state_dict(extra["scaler"])
        self.console.print(f"goes on after epoch {epoch}, step {self.steps}")
        return int(epoch)

    # ---- the end ----

    def close(self) -> None:
        """Leave the job; rank 0 prints the figures, and writes them where ``--result`` says."""
        self.store.barrier()  # so that the counters are those of all workers
        if self.store.rank == 0:
            stats = self.store.stats()
            about = {"network": self.args.network, "kv_store": self.store.type, "num_workers": self.store.num_workers}
            about |= {"devices": self.where, "gc_type": self.args.gc_type, "seconds": round(self.seconds, 3)}
            if self.figures:
                about["samples_per_s"] = round(self.seen / self.seconds, 1)
                report(self.console, f"Trained {self.args.network}", about | stats | self.figures[-1] | about)
            if self.args.result:
                accuracies = [epoch["top-1"] for epoch in self.figures]
                result = about | {"accuracy": accuracies, "epochs": self.figures, "stats": stats}
                self.args.result.write_text(json.dumps(result, indent=2))
        self.store.close()  # paceline: 3. leave the job


def report(console: Console, title: str, figures: dict[str, Any]) -> None:
    """Print a table of figures."""
    table = Table(title=title, show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
