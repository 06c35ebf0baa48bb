"""Worker of the training benchmark: the same loop under paceline, its Horovod interface, DDP over Gloo, and alone."""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.hvd as hvd
from examples.models import NETWORKS

SHAPES = {"mlp": (1, 28, 28), "lenet": (1, 28, 28), "resnet18": (3, 32, 32)}

#: Contenders of paceline: who steps.
UPDATES = {"paceline": "worker", "paceline-server": "server"}


def main() -> None:
    how, name, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(0)
    net = NETWORKS[name]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    rank = 0
    if how in UPDATES:
        store = paceline.kvstore.create("dist_sync")
        rank = store.rank
        optimizer = paceline.DistributedOptimizer(optimizer, kvstore=store, model=net, update=UPDATES[how])
    elif how == "hvd":
        hvd.init()
        rank = hvd.rank()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    elif how == "ddp":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        net = DistributedDataParallel(net)
    images, labels = torch.randn(batch, *SHAPES[name]), torch.randint(10, (batch,))
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    if rank == 0:
        ms = statistics.median(times[2:]) * 1e3
        print(json.dumps({"ms": ms, "samples_per_s": batch / ms * 1e3}), flush=True)
    if how == "ddp":
        # DDP's end holds the interpreter's lock and joins Gloo's threads, which may wait for it: at times for ever.
        dist.barrier()
        os._exit(0)


main()
