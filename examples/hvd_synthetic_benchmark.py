"""How many images per second the Horovod interface trains: flags and output as of Horovod's script of this name.

paceline hvdrun -np 2 python examples/hvd_synthetic_benchmark.py --batch-size 8
"""

from __future__ import annotations

import argparse
import timeit

import torch
from models import NETWORKS
from torch.nn import functional as F

import paceline.hvd as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--model", choices=sorted(NETWORKS), default="resnet18")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    model = NETWORKS[options.model]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 if options.use_adasum else hvd.size()))
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    channels = 3 if options.model.startswith("resnet") else 1
    data = torch.randn(options.batch_size, channels, options.image_size, options.image_size)
    target = torch.randint(10, (options.batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()

    timeit.timeit(step, number=options.num_warmup_batches)
    rates = []
    for number in range(options.num_iters):
        seconds = timeit.timeit(step, number=options.num_batches_per_iter)
        rates.append(options.batch_size * options.num_batches_per_iter / seconds)
        if hvd.rank() == 0:
            print(f"Iter #{number}: {rates[-1]:.1f} img/sec per rank")
    rate = torch.tensor(rates)
    if hvd.rank() == 0:
        print(f"Img/sec per rank: {rate.mean():.1f} +-{1.96 * rate.std(unbiased=False):.1f}")
        print(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * rate.mean():.1f}")


if __name__ == "__main__":
    main()
