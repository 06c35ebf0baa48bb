"""What the workers of a soak do, each over a transport of its own: steps of every way to train."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import paceline
from paceline import kvstore
from paceline.gluon import Trainer, backward, replicate
from paceline.kvstore.dist import DistStore
from paceline.mx.context import cpu
from paceline.testing import listen, tell
from paceline.worker.current import current_session
from tests.soak.census import census, leave_out_what_is_there

#: Environment of a worker for each transport.
TRANSPORTS = {
    "shm": {},
    "unix": {"PACELINE_SHARED_MEMORY": "0"},
    "tcp": {"PACELINE_SHARED_MEMORY": "0", "PACELINE_UNIX_SOCKETS": "0", "PACELINE_ENCRYPT": "1"},
    "tcp-plain": {"PACELINE_SHARED_MEMORY": "0", "PACELINE_UNIX_SOCKETS": "0", "PACELINE_ENCRYPT": "0"},
}
CODEC = {"type": "2bit", "threshold": 0.01}

#: Steps between two questions whether to go on. After so many, every way to train stands as it did before.
CHUNK = 24

Step = Callable[[], object]


def new_store(mode: str) -> DistStore:
    """Return a store of a mode for any number of workers."""
    workers = current_session().settings.num_workers
    halves = [list(range(workers // 2)), list(range(workers // 2, workers))]
    options: dict[str, dict[str, Any]] = {
        "dist_ssync": {"staleness": 2},
        "dist_gsync": {"groups": [half for half in halves if half], "staleness": 3},
        "dist_ksync": {"k": max(1, workers // 2)},
    }
    store = kvstore.create(mode, **options.get(mode, {}))
    assert isinstance(store, DistStore)
    return store


def net() -> nn.Module:
    """Return a tiny model whose largest gradient does not travel with the head of a message."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 128), nn.Linear(128, 4))


def raw(store: DistStore, codec: bool) -> Step:
    """Push and pull: lists of keys, single keys, and both at once."""
    if codec:
        store.set_gradient_compression(CODEC)
    store.set_optimizer("sgd", lr=1e-4, momentum=0.9)
    keys, sizes = list("abcdef"), [3, 50, 700, 4000, 9000, 20000]
    values = [torch.zeros(size) for size in sizes]
    store.init(keys, values)
    grads = [torch.full((size,), 1e-3) for size in sizes]
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        if number % 8 == 0:
            for key, grad, value in zip(keys, grads, values, strict=True):
                store.push(key, grad)
                store.pull(key, out=value)
        elif number % 2:
            store.push(keys, grads)
            store.pull(keys, out=values)
        else:
            store.pushpull(keys, grads, out=values)

    return step


def rows(store: DistStore, codec: bool) -> Step:
    """Push rows and pull some of them."""
    store.set_optimizer("sgd", lr=1e-4)
    store.init("table", torch.zeros(50, 8).to_sparse(1))
    chance = torch.Generator().manual_seed(store.rank)
    out = torch.zeros(50, 8)

    def step() -> None:
        ids = torch.randint(0, 50, (1, 6), generator=chance)
        store.push("table", torch.sparse_coo_tensor(ids, torch.ones(6, 8), (50, 8), check_invariants=True))
        store.row_sparse_pull("table", out=out, row_ids=ids)

    return step


def optimizer(store: DistStore, codec: bool) -> Step:
    """A usual loop around DistributedOptimizer."""
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    wrapped = paceline.DistributedOptimizer(
        inner, store, model=model, compression=CODEC if codec else None, on_nan="skip"
    )
    data = torch.randn(4, 8)

    def step() -> None:
        wrapped.zero_grad()
        model(data).square().mean().backward()
        wrapped.step()

    return step


def trainer(store: DistStore, codec: bool) -> Step:
    """A usual loop around gluon's Trainer."""
    model = replicate(net(), [cpu(0)])
    options = {"compression_params": CODEC} if codec else {}
    made = Trainer(model, "sgd", {"learning_rate": 1e-4}, store, **options)
    data = torch.randn(4, 8)

    def step() -> None:
        backward([one.square().sum() for one in model([data])])
        made.step(4)

    return step


FRONTS = {"raw": raw, "rows": rows, "optimizer": optimizer, "trainer": trainer}


def work(modes: Sequence[str], fronts: Sequence[str], phases: Sequence[tuple[int, float]]) -> None:
    """Train in several phases; before and after each, tell what this process holds and wait for a word.

    Args:
        modes: of the stores.
        fronts: names of ways to train, ``+codec`` for the same with a codec.
        phases: at least so many steps, for at least so many seconds.
    """
    importlib.import_module("torch._dynamo")  # as an optimizer would
    leave_out_what_is_there()
    session = current_session()
    made = {front: [_front(front, mode) for mode in modes] for front in fronts}
    for steps, seconds in phases:
        until, done = time.monotonic() + seconds, 0
        while _go_on(session, done < steps or time.monotonic() < until):
            for ways in made.values():
                _train(ways)
            done += CHUNK
        tell({"steps": done, "census": census()})
        listen(600.0)


def _front(front: str, mode: str) -> tuple[Step, DistStore]:
    """Return a way to train in a mode, and its store."""
    store = new_store(mode)
    return FRONTS[front.removesuffix("+codec")](store, front.endswith("+codec")), store


def _train(ways: Sequence[tuple[Step, DistStore]]) -> None:
    """Take some steps of one way to train, in all modes in turn, and meet the other workers."""
    for _ in range(CHUNK):
        for step, _ in ways:
            step()
    for _, store in ways:
        # A gather is no barrier of the store: with dist_ksync a push may wait for one of a worker that gathers.
        store.barrier()


def _go_on(session: Any, wanted: bool) -> bool:
    """Return what worker 0 wants, the same on all workers."""
    return bool(session.gather("soak", b"1" if wanted else b"0")[0] == b"1")
