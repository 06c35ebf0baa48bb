"""Train an image classifier on ImageNet, or measure how fast it trains, with the flags of MXNet's script of this name.

    python examples/make_data.py imagenet /tmp/images                   # a small data set in the same folders
    python examples/train_imagenet.py --data-dir /tmp/images --network resnet-v1 --num-layers 18 --image-shape 3,64,64
    paceline launch -n 4 -s 4 -- python examples/train_imagenet.py --benchmark 1 --network resnet --num-layers 50 \\
        --kv-store dist_sync --batch-size 32 --price-per-hour 3.06

The loop is that of ``common/fit.py``. With ``--benchmark 1`` images are made up, and the speed is reported: per
worker, of all workers, beside that of a worker by itself, and with ``--price-per-hour`` what an epoch costs.
"""

from __future__ import annotations

import argparse
import copy
import json
import time

import torch
from common import fit, flags
from common.imagenet import ImageNet
from models import build
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from paceline.kvstore import KVStoreBase

#: Images of ImageNet's training set.
EPOCH = 1_281_167


def main() -> None:
    parser = flags.parser(__doc__, network="resnet", lr=0.1, lr_step_epochs="30,60,80", num_epochs=90)
    parser.add_argument("--image-shape", default="3,224,224", help="channels, height and width (3,224,224)")
    benchmark = parser.add_argument_group("benchmark")
    benchmark.add_argument("--benchmark", type=int, choices=[0, 1], default=0, help="1: images are made up")
    benchmark.add_argument("--num-batches", type=int, default=20, help="batches that are measured (20)")
    benchmark.add_argument("--price-per-hour", type=float, help="of one worker, in any currency")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    size = int(args.image_shape.split(",")[-1])
    store = fit.open_store(args)
    if args.benchmark:
        args.num_classes = args.num_classes or 1000
        measure(args, build(args.network, **flags.network_options(args, size)), size, store)
        return
    data = ImageNet(args, store, size)
    args.num_classes = args.num_classes or data.num_classes
    fit.fit(args, build(args.network, **flags.network_options(args, size)), data, store)


class MadeUp:
    """The same batch of random images again and again."""

    def __init__(self, batch_size: int, size: int, num_classes: int, batches: int) -> None:
        self.batch = torch.randn(batch_size, 3, size, size), torch.randint(num_classes, (batch_size,))
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def train(self, epoch: int) -> list[fit.Batch]:
        return [self.batch] * self._batches

    def test(self) -> list[fit.Batch]:
        return []


def alone(net: nn.Module, data: MadeUp, batches: int) -> float:
    """Return the images per second of this worker without exchanging gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    images, labels = data.batch
    for number in range(batches + 2):
        if number == 2:  # the first ones allocate memory
            begun = time.perf_counter()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return batches * len(labels) / (time.perf_counter() - begun)


def measure(args: argparse.Namespace, net: nn.Module, size: int, store: KVStoreBase) -> None:
    """Print the speed of training, and write it where ``--result`` says."""
    data = MadeUp(args.batch_size, size, args.num_classes, args.num_batches)
    store.barrier()
    ideal = alone(copy.deepcopy(net), data, max(1, args.num_batches // 4)) * store.num_workers
    training = fit.Training(args, net, data, store)
    for images, labels in data.train(0)[:3]:  # connections, buffers and plans are made
        training.step(images, labels)
    store.barrier()
    begun = time.perf_counter()
    for images, labels in data.train(0):
        training.step(images, labels)
    mine = args.num_batches * args.batch_size / (time.perf_counter() - begun)
    store.barrier()
    total = store.num_workers * args.num_batches * args.batch_size / (time.perf_counter() - begun)
    if store.rank == 0:
        report(args, figures(args, store, mine, total, ideal))
    store.close()


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


def report(args: argparse.Namespace, found: dict[str, str | float]) -> None:
    table = Table(title="speed of training", show_header=False)
    for name, value in found.items():
        table.add_row(name, str(value))
    Console().print(table)
    if args.result:
        args.result.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
