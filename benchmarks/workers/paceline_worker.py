"""Worker of the key-value benchmark: push, optimizer, pull of all keys, by the store's verbs or out of the arena."""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import paceline
from benchmarks.shapes import shapes_of
from paceline.kvstore.dist import DistStore


def main() -> None:
    shapes_name, optimizer, codec, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    store = paceline.kvstore.create("dist_sync")
    assert isinstance(store, DistStore)
    if optimizer == "sgd":
        store.set_optimizer("sgd", lr=0.01, momentum=0.9)
    if codec != "none":
        store.set_gradient_compression({"type": codec, **({"threshold": 0.01} if codec == "2bit" else {})})
    shapes = shapes_of(shapes_name)
    keys = list(range(len(shapes)))
    weights = [torch.randn(shape) * 0.01 for shape in shapes]
    grads = [torch.randn(shape) * 0.01 for shape in shapes]
    store.init(keys, weights)
    step = from_arena(store, keys) if os.environ.get("BENCHMARK_ARENA") else by_verbs(store, keys, grads, weights)
    step()
    store.barrier()
    times, before = [], crossed()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    store.barrier()
    sent, received = ((now - then) / steps / 1e6 for then, now in zip(before, crossed(), strict=True))
    if store.rank == 0:
        size_mb = sum(weight.numel() * 4 for weight in weights) / 1e6
        result = {"ms": statistics.median(times[2:]) * 1e3, "min_ms": min(times) * 1e3, "mb": size_mb}
        print(json.dumps(result | {"sent_mb": sent, "received_mb": received}))


def crossed():
    """Return the bytes that this host's interfaces have sent and received, but for the one to itself."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    words = [line.split(":")[1].split() for line in lines if not line.lstrip().startswith("lo:")]
    return sum(int(word[8]) for word in words), sum(int(word[0]) for word in words)


def by_verbs(store, keys, grads, weights):
    return lambda: store.pushpull(keys, grads, weights)


def from_arena(store, keys):
    """What DistributedOptimizer does: gradients are born in the arena and weights live there."""
    plan = store.table.plan(tuple(keys))

    def step():
        for one in plan.steps:
            for server, located in one.sends.items():
                store.traffic.push_ranges(server, located, store.carried())
        for one in plan.steps:
            store.traffic.wait(one)

    return step


main()
