"""Worker of the benchmark of what the account of steps costs: blocks of steps with it and without, in pairs."""

import json
import random
import statistics
import sys
import time

import torch
from torch.nn.functional import cross_entropy

import paceline
from benchmarks.switch import turn
from examples.models import NETWORKS

SHAPES = {"lenet": (1, 28, 28), "resnet18": (3, 32, 32)}


def main() -> None:
    name, batch, steps, count = sys.argv[1], *map(int, sys.argv[2:5])
    torch.manual_seed(0)
    net = NETWORKS[name]()
    store = paceline.kvstore.create("dist_sync")
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    optimizer = paceline.DistributedOptimizer(sgd, kvstore=store, model=net)
    images, labels = torch.randn(batch, *SHAPES[name]), torch.randint(10, (batch,))

    def block(is_on: bool) -> float:
        """Return the median milliseconds of a step."""
        turn(is_on)
        store.send_command_to_servers("observe", "on" if is_on else "off")
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(net(images), labels).backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    block(True)
    order, pairs = random.Random(0), []
    for _ in range(count):
        found = {is_on: block(is_on) for is_on in order.sample((True, False), 2)}
        pairs.append((found[True], found[False]))
    turn(True)
    store.send_command_to_servers("observe", "on")
    print(json.dumps({"pairs": pairs}), flush=True)


main()
