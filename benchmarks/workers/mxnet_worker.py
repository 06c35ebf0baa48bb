"""Any role of an MXNet job; as a worker it pushes and pulls all keys through MXNet's own dist_sync store."""

import json
import os
import statistics
import sys
import time

import numpy as np

# Names that MXNet 1.9.1 uses and later versions of numpy have dropped.
np.bool = bool

import mxnet as mx  # noqa: E402

from benchmarks.shapes import shapes_of  # noqa: E402


def main():
    shapes_name, optimizer, codec, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    store = mx.kv.create("dist_sync")
    if codec != "none":
        store.set_gradient_compression({"type": codec, "threshold": 0.01})
    shapes = shapes_of(shapes_name)
    keys = [str(index) for index in range(len(shapes))]
    weights = [mx.nd.random.normal(shape=shape) * 0.01 for shape in shapes]
    grads = [mx.nd.random.normal(shape=shape) * 0.01 for shape in shapes]
    mx.nd.waitall()
    store.init(keys, weights)
    if optimizer == "sgd":
        store.set_optimizer(mx.optimizer.SGD(learning_rate=0.01, momentum=0.9))
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        store.push(keys, grads)
        store.pull(keys, out=weights)
        mx.nd.waitall()
        times.append(time.perf_counter() - start)
    if store.rank == 0:
        print(json.dumps({"ms": statistics.median(times[3:]) * 1e3, "min_ms": min(times) * 1e3}), flush=True)


if os.environ["DMLC_ROLE"] == "worker":
    main()
