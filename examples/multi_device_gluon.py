"""Training on several devices with gluon, step by step: the multi-GPU chapter of the Gluon book as a script.

python examples/multi_device_gluon.py                # two logical CPU devices
python examples/multi_device_gluon.py --gpus 0,1     # two GPUs
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import nn

import paceline
from paceline import Context, gluon


def build() -> nn.Module:
    # Lazy layers take their shapes from the first batch, as in Gluon.
    return nn.Sequential(
        nn.LazyConv2d(20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.LazyConv2d(50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.LazyLinear(10),
    )  # fmt: skip


def forward_backward(net: gluon.ReplicatedModule, data: list[torch.Tensor], label: list[torch.Tensor]) -> None:
    # Gradients are sums over samples: Trainer.step divides by the batch size.
    loss = nn.CrossEntropyLoss(reduction="sum")
    gluon.backward([loss(output, target) for output, target in zip(net(data), label, strict=True)])


def look_inside(devices: list[Context], train: paceline.data.ArrayDataset) -> None:
    """Run four samples and print what every device holds."""
    net = gluon.replicate(build(), devices)
    images, labels = train[:4]
    data = gluon.split_and_load(images, devices, even_split=False)
    for output, device in zip(net(data), devices, strict=True):
        print(f"=== output on {device} ===\n{output.detach()}")
    forward_backward(net, data, gluon.split_and_load(labels, devices, even_split=False))
    weight = net.collect_params()["0.weight"]
    for device in devices:
        print(f"=== channel 0 of the first convolution on {device} ===\n{weight.data(device)[0]}")
        print(f"=== its gradient on {device} ===\n{weight.grad(device)[0]}")


def accuracy(net: gluon.ReplicatedModule, test: paceline.data.ArrayDataset) -> float:
    net.eval()
    with torch.no_grad():
        images, labels = test[:]
        slices = gluon.split_and_load(images, net.contexts, even_split=False)
        predicted = torch.cat([output.argmax(1).cpu() for output in net(slices)])
    net.train()
    return float((predicted == labels).float().mean())


def run(
    devices: list[Context],
    batch_size: int,
    learning_rate: float,
    args: argparse.Namespace,
    train: paceline.data.ArrayDataset,
    test: paceline.data.ArrayDataset,
) -> float:
    print(f"Running on {devices}, batch size {batch_size}")
    torch.manual_seed(0)
    net = gluon.replicate(build(), devices)
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": learning_rate, "momentum": 0.9}, kvstore=args.kv_store
    )
    batches = paceline.data.batches(train, paceline.data.ShardedSampler(train), batch_size)
    for epoch in range(args.num_epochs):
        start = time.perf_counter()
        for images, labels in batches:
            data = gluon.split_and_load(images, devices, even_split=False)
            forward_backward(net, data, gluon.split_and_load(labels, devices, even_split=False))
            trainer.step(len(labels))
        print(f"Epoch {epoch}, training time = {time.perf_counter() - start:.1f} sec")
        print(f"         validation accuracy = {accuracy(net, test):.4f}")
    return accuracy(net, test)


def main(words: Sequence[str] | None = None) -> list[float]:
    """Train on one device, and on all of them; return both accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", help="numbers of the GPUs to use: 0,1")
    where.add_argument("--cpus", type=int, default=2, help="how many logical CPU devices to use (2)")
    parser.add_argument("--kv-store", default="device", help="local or device (device)")
    parser.add_argument("--num-epochs", type=int, default=5)
    args = parser.parse_args(words)

    cpus = [paceline.cpu(i) for i in range(args.cpus)]
    devices = [paceline.gpu(int(i)) for i in args.gpus.split(",")] if args.gpus else cpus
    train, test = paceline.data.digits(train=True), paceline.data.digits(train=False)
    look_inside(devices, train)
    return [run(devices[:count], 64 * count, 0.05 * count, args, train, test) for count in (1, len(devices))]


if __name__ == "__main__":
    main()
