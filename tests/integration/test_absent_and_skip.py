"""Keys without a gradient, skipped rounds and values that are set, in real jobs on one host."""

from dataclasses import replace

import pytest
import torch

from paceline import kvstore
from paceline.errors import ConfigError
from paceline.testing import LocalJob

KEYS, SHAPES = ["a", "b", "c"], [(40,), (30, 10), (7,)]
ROUNDS = 6


def gradient(rank, round, position):
    """Return a gradient or None: key a has one everywhere, b on one worker, c on nobody in odd rounds."""
    if (position == 1 and rank != round % 2) or (position == 2 and round % 2):
        return None
    generator = torch.Generator().manual_seed(100 * round + 10 * rank + position)
    return torch.randn(SHAPES[position], generator=generator)


def push(store, grads, skip=False):
    for step in store.table.plan(tuple(KEYS)).steps:
        store.traffic.wait(step)
        absent = []
        for grad, target, (block, index) in zip(grads, step.grads, step.places, strict=True):
            if grad is None:
                target.fill_(float("nan"))
                absent += block.ranges([index])
            else:
                target.copy_(grad)
        for route, spans in step.sends.items():
            places = {one.place for one in spans}
            gone = [one for one in absent if one.place in places]
            store.traffic.push_ranges(route, spans, replace(store.carried(), skip=skip), absent=gone)
        step.set_fresh(True)


def pull(store):
    outs = [torch.zeros(shape) for shape in SHAPES]
    store.pull(KEYS, outs)
    return outs


def new_store():
    store = kvstore.create("dist_sync").for_optimizer(mean=True)
    store.set_optimizer("adam", lr=0.01, weight_decay=0.1)
    store.init(KEYS, [torch.ones(shape) for shape in SHAPES])
    store.samples = 1.0 + store.rank
    return store


def train():
    """Return the largest difference to one process, the missing keys of the last round, and the counters."""
    store = new_store()
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    oracle = torch.optim.Adam(params, lr=0.01, weight_decay=0.1)
    for round in range(ROUNDS):
        push(store, [gradient(store.rank, round, position) for position in range(3)])
        for position, param in enumerate(params):
            found = [gradient(rank, round, position) for rank in range(2)]
            parts = [grad * (1 + rank) / 3 for rank, grad in enumerate(found) if grad is not None]
            param.grad = sum(parts) if parts else None
        oracle.step()
    push(store, [torch.full(shape, float("inf")) for shape in SHAPES], skip=store.rank == 0)
    values = pull(store)
    difference = max((one - other).abs().max().item() for one, other in zip(values, params, strict=True))
    push(store, [gradient(store.rank, 1, position) for position in range(3)])
    pull(store)
    places = zip(KEYS, store.table.locate(KEYS), strict=True)
    missing = [key for key, (block, index) in places if block.is_missing(index)]
    store.barrier()
    found = store.stats()
    if store.rank == 0:
        store.set_values("b", torch.full(SHAPES[1], 4.0))
    store.barrier()
    return [difference, missing, found["skipped"], found["updates"], pull(store)[1].unique().tolist()]


def train_with_unlike_rates():
    store = new_store()
    store.set_options([{"lr": 0.1 * (1 + store.rank)}])
    push(store, [torch.ones(shape) for shape in SHAPES])
    try:
        pull(store)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("servers", "shared"), [(1, True), (2, False)])
def test_absent_keys_and_skipped_rounds_are_those_of_one_process(servers, shared):
    with LocalJob(num_workers=2, num_servers=servers, shared_memory=shared) as job:
        for difference, missing, skipped, updates, values in job.run(train):
            assert difference < 1e-6
            assert missing == ["c"]
            assert (skipped, updates) == (1.0, ROUNDS + 2)
            assert values == [4.0]


def test_unlike_rates_are_told_to_all_workers():
    with LocalJob(num_workers=2) as job:
        for text in job.run(train_with_unlike_rates):
            assert "lr of param group 0 is 0.1 on worker 0 and 0.2 on worker 1, round 1" in text
