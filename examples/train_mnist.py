"""Train LeNet or a multi-layer perceptron on handwritten digits, on one machine or on many that are not alike.

    python examples/train_mnist.py
    python examples/train_mnist.py --gpus 0,2 --kv-store device
    paceline launch -n 4 -s 2 -- python examples/train_mnist.py --kv-store dist_sync
    paceline launch -n 4 -s 2 -- python examples/train_mnist.py --kv-store dist_async --gc-type 2bit

A plain PyTorch loop; the lines that paceline adds are marked ``# paceline:``. With several devices (``--gpus 0,2``, or
``--cpus 2`` to try it anywhere) a step is that of ``devices.py``. Without ``--data-dir`` it trains on the 1,797 digits
that come with paceline, so it needs no download.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import devices
import torch
from common import fit, flags
from common.schedule import rate_factor
from models import NETWORKS
from readers import MNIST
from reporting import accuracy, report
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn import functional as F

import paceline

# With more workers an update comes from more samples (dist_sync) or is staler (dist_async). A small step with little
# momentum stands both; Adam does too, but not the coarse gradients of --gc-type 2bit.
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.03, momentum=0.5),
    "adam": partial(torch.optim.Adam, lr=0.001),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices.add_arguments(parser)
    parser.add_argument("--network", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--kv-store", default="local", help="local, dist_sync, dist_async, dist_ssync, dist_gsync, ...")
    parser.add_argument("--staleness", type=int, help="rounds a worker may run ahead in dist_ssync and dist_gsync")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step (16)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--lr", type=float, help="learning rate (0.03 for sgd, 0.001 for adam)")
    parser.add_argument("--mom", type=float, help="momentum of sgd (0.5)")
    parser.add_argument("--wd", type=float, default=0.0, help="weight decay (0)")
    flags.add_schedule(parser.add_argument_group("learning rate"))
    flags.add_part(parser.add_argument_group("samples"))
    parser.add_argument("--num-epochs", type=int, default=15)
    parser.add_argument("--gc-type", choices=["none", "2bit"], default="none", help="gradient compression")
    parser.add_argument("--gc-threshold", type=float, default=0.01, help="size of a 2-bit step (0.01)")
    parser.add_argument("--data-dir", help="folder with MNIST's four files, instead of paceline's digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="write accuracy, speed and the store's counters to this JSON file")
    return parser.parse_args()


def new_optimizer(args: argparse.Namespace, net: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that flags name; it does not know of other workers."""
    if args.optimizer == "adam" and args.mom is not None:
        raise SystemExit("--mom is of --optimizer sgd; adam has no momentum to set")
    given = {"lr": args.lr, "momentum": args.mom, "weight_decay": args.wd}
    return OPTIMIZERS[args.optimizer](net.parameters(), **{key: one for key, one in given.items() if one is not None})


def step_on_one(net: nn.Module, optimizer: Any, device: torch.device) -> devices.Step:
    """Return a function that trains ``net`` on one batch."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(net(images.to(device)), labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    where = devices.named(args)
    options = {} if args.staleness is None else {"staleness": args.staleness}
    options |= devices.store_options(args.kv_store, where)
    store = paceline.kvstore.create(args.kv_store, **options)  # paceline: 1. join the job

    load = partial(MNIST, args.data_dir) if args.data_dir else paceline.data.digits
    train, test = load(train=True), load(train=False)
    train = paceline.data.ArrayDataset(*(one[: args.num_examples] for one in train.tensors))
    sampler = fit.own_part(args, len(train), store)  # paceline: 2. train on my part
    # drop_last: a last batch of fewer samples than devices could not be split.
    loader = paceline.data.batches(
        train, sampler, sampler.batch_size or args.batch_size, drop_last=len(where) > 1
    )  # fmt: skip

    net = NETWORKS[args.network]().to(where[0].device)
    optimizer = new_optimizer(args, net)
    compression = devices.compression(args, where)
    if len(where) > 1:
        step = devices.step_on_all(net, optimizer, store, compression, where)
    else:
        # paceline: 3. the gradient becomes the mean over all workers' samples, the weights start as rank 0's
        optimizer = paceline.DistributedOptimizer(optimizer, kvstore=store, model=net, compression=compression)
        step = step_on_one(net, optimizer, where[0].device)
    factor = rate_factor(args, store.num_workers, max(1, len(loader)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    console = Console(quiet=store.rank != 0)
    accuracies, seconds = [], 0.0
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=args.num_epochs * len(loader))
        for epoch in range(args.num_epochs):
            start = time.perf_counter()
            for images, labels in loader:
                step(images, labels)
                schedule.step()
                progress.advance(bar)
            elapsed = time.perf_counter() - start
            seconds += elapsed
            if store.rank == 0:
                speed = len(sampler) / elapsed
                accuracies.append(accuracy(net, test, where[0].device))
                console.print(f"epoch {epoch}: {speed:.0f} samples/s per worker, accuracy {accuracies[-1]:.4f}")

    store.barrier()  # so that the counters are those of all workers
    if store.rank == 0:
        about = {"network": args.network, "kv_store": store.type, "num_workers": store.num_workers}
        about["devices"] = ", ".join(map(str, where))
        speed = {"seconds": round(seconds, 3), "samples_per_s": round(args.num_epochs * len(sampler) / seconds, 1)}
        result = about | {"gc_type": args.gc_type} | speed | {"accuracy": accuracies, "stats": store.stats()}
        report(console, result, args.result)
    store.close()  # paceline: 4. leave the job


if __name__ == "__main__":
    main()
