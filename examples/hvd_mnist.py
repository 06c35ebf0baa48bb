"""Train LeNet on handwritten digits with the Horovod interface. Only the import differs from a script of Horovod's.

    paceline hvdrun -np 2 python examples/hvd_mnist.py
    paceline launch -n 2 -- python examples/hvd_mnist.py
    torchrun --nproc-per-node 2 examples/hvd_mnist.py
    mpirun -np 2 python examples/hvd_mnist.py

Without ``--data-dir`` it trains on the 1,797 digits that come with paceline, so it needs no download.
"""

from __future__ import annotations

import argparse

import torch
from models import lenet
from readers import MNIST
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import paceline.hvd as hvd
from paceline.data import digits


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step (16)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--data-dir", help="folder with MNIST's four files, instead of paceline's digits")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    train, test = (
        MNIST(options.data_dir, train=part) if options.data_dir else digits(train=part) for part in (True, False)
    )
    sampler: DistributedSampler[object] = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)

    model = lenet()
    scale = 1 if options.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * scale, momentum=options.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        right = torch.tensor(0.0)
        part = range(hvd.rank(), len(test), hvd.size())
        with torch.no_grad():
            for index in part:
                image, label = test[index]
                right += int(model(image[None]).argmax()) == int(label)
        total = hvd.allreduce(right, op=hvd.Sum, name="right")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {total.item() / len(test):.4f}")


if __name__ == "__main__":
    main()
