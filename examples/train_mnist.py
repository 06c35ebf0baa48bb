"""Train LeNet or a multi-layer perceptron on handwritten digits, on one machine or on many that are not alike.

    python examples/train_mnist.py
    paceline launch -n 4 -s 2 -- python examples/train_mnist.py --kv-store dist_sync
    paceline launch -n 4 -s 2 -- python examples/train_mnist.py --kv-store dist_async --gc-type 2bit

A plain PyTorch loop; the lines that paceline adds are marked ``# paceline:``. Without ``--data-dir`` it trains on the
1,797 digits that scikit-learn carries, so it needs no download.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from networks import NETWORKS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
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
    parser.add_argument("--network", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--kv-store", default="local", help="local, dist_sync, dist_async, dist_ssync, dist_gsync, ...")
    parser.add_argument("--staleness", type=int, help="rounds a worker may run ahead in dist_ssync and dist_gsync")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step (16)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--lr", type=float, help="learning rate (0.03 for sgd, 0.001 for adam)")
    parser.add_argument("--num-epochs", type=int, default=15)
    parser.add_argument("--gc-type", choices=["none", "2bit"], default="none", help="gradient compression")
    parser.add_argument("--gc-threshold", type=float, default=0.01, help="size of a 2-bit step (0.01)")
    parser.add_argument("--data-dir", help="folder with MNIST's four files, instead of scikit-learn's digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="write accuracy, speed and the store's counters to this JSON file")
    return parser.parse_args()


@torch.no_grad()
def accuracy(net: nn.Module, test: paceline.data.ArrayDataset) -> float:
    loader = paceline.data.batches(test, batch_size=500)
    return sum(int((net(images).argmax(1) == labels).sum()) for images, labels in loader) / len(test)


def report(console: Console, result: dict[str, Any], file: Path | None) -> None:
    table = Table(title=f"Trained {result['network']}", show_header=False)
    for name, value in {**result, **result["stats"], "accuracy": result["accuracy"][-1]}.items():
        if name != "stats":
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if file:
        file.write_text(json.dumps(result, indent=2))


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    options = {} if args.staleness is None else {"staleness": args.staleness}
    store = paceline.kvstore.create(args.kv_store, **options)  # paceline: 1. join the job

    load = partial(paceline.data.MNIST, args.data_dir) if args.data_dir else paceline.data.digits
    train, test = load(train=True), load(train=False)
    sampler = paceline.data.ShardedSampler(train, store.num_workers, store.rank)  # paceline: 2. train on my part
    loader = paceline.data.batches(train, sampler, args.batch_size)

    net = NETWORKS[args.network]()
    optimizer = OPTIMIZERS[args.optimizer](net.parameters(), **({} if args.lr is None else {"lr": args.lr}))
    compression = {"type": args.gc_type, "threshold": args.gc_threshold} if args.gc_type != "none" else None
    # paceline: 3. the gradient becomes the mean over all workers' samples, the weights start as rank 0's
    optimizer = paceline.DistributedOptimizer(optimizer, kvstore=store, model=net, compression=compression)

    console = Console(quiet=store.rank != 0)
    accuracies, seconds = [], 0.0
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=args.num_epochs * len(loader))
        for epoch in range(args.num_epochs):
            start = time.perf_counter()
            for images, labels in loader:
                F.cross_entropy(net(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.advance(bar)
            elapsed = time.perf_counter() - start
            seconds += elapsed
            if store.rank == 0:
                speed = len(sampler) / elapsed
                accuracies.append(accuracy(net, test))
                console.print(f"epoch {epoch}: {speed:.0f} samples/s per worker, accuracy {accuracies[-1]:.4f}")

    store.barrier()  # so that the counters are those of all workers
    if store.rank == 0:
        about = {"network": args.network, "kv_store": store.type, "num_workers": store.num_workers}
        speed = {"seconds": round(seconds, 3), "samples_per_s": round(args.num_epochs * len(sampler) / seconds, 1)}
        result = about | {"gc_type": args.gc_type} | speed | {"accuracy": accuracies, "stats": store.stats()}
        report(console, result, args.result)
    store.close()  # paceline: 4. leave the job


if __name__ == "__main__":
    main()
