"""Calls on a store that is closed, and calls of a worker that has left, are errors that say so."""

import pytest
import torch

from paceline import DistributedOptimizer, kvstore
from paceline.testing import LocalJob

VERBS = {
    "init": lambda store: store.init("x", torch.zeros(3)),
    "push": lambda store: store.push("w", torch.ones(3)),
    "pushpull": lambda store: store.pushpull("w", torch.ones(3)),
    "broadcast": lambda store: store.broadcast("y", torch.ones(3), out=torch.zeros(3)),
    "set_values": lambda store: store.set_values("w", torch.ones(3)),
    "set_optimizer": lambda store: store.set_optimizer("sgd", lr=0.1),
    "set_updater": lambda store: store.set_updater("add"),
    "barrier": lambda store: store.barrier(),
    "stats": lambda store: store.stats(),
}


def said(call, *arguments):
    """Return type and text of the error of a call; nothing of one that returns."""
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test says whether it is the right one
        return [type(error).__name__, str(error)]
    return []


def calls_after_close():
    found = {}
    for what in ("store", "worker"):
        store = kvstore.create("dist_sync", namespace=what)
        store.init("w", torch.zeros(3))
        store.pushpull("w", torch.ones(3))
        model = torch.nn.Linear(3, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync", model=model)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for one in (store, optimizer.kvstore):
            one.close() if what == "store" else one.session.close()
        found[what] = {verb: said(call, store) for verb, call in VERBS.items()}
        found[what]["backward"] = said(lambda model=model: model(torch.ones(2, 3)).sum().backward())
        found[what]["closed twice"] = said(store.close)
        found[what]["read"] = said(optimizer.state_dict) + said(model.state_dict)
        found[what]["read"] += said(store.pull, "w", torch.zeros(3))  # this worker has the values
    return found


def a_namespace_is_used_again():
    """Worker 1 leaves the first store long after worker 0 uses the second one."""
    other = kvstore.create("dist_sync", namespace="order")
    first = kvstore.create("dist_async", namespace="twice")
    first.set_optimizer("sgd", lr=1.0)
    first.init("w", torch.zeros(3))
    first.push("w", torch.ones(3))
    if first.rank == 0:
        first.close()
    second, value = kvstore.create("dist_sync", namespace="twice") if first.rank == 0 else None, torch.zeros(5)
    other.barrier()
    if first.rank == 1:
        first.barrier()  # does not wait for worker 0
        first.close()
        second = kvstore.create("dist_sync", namespace="twice")
    second.init("w", torch.full((5,), 3.0))
    second.pushpull("w", torch.ones(5), out=value)
    second.close()
    second.session.stores.pause()  # of the stores that are open
    return value.tolist()


@pytest.fixture(scope="module")
def found():
    with LocalJob(2, 1, timeout_s=20) as job:
        workers = job.run(calls_after_close)
        assert [one.wait(30) for one in (*job.servers, job.scheduler)] == [0, 0]
    return workers


@pytest.mark.parametrize("call", [*VERBS, "backward"])
@pytest.mark.parametrize("what", ["store", "worker"])
def test_every_call_after_close_says_that_the_store_is_closed(found, what, call):
    words = "is closed on worker {}; create another one" if what == "store" else "worker {} has left the job"
    for rank, worker in enumerate(found):
        kind, text = worker[what][call]
        assert kind == "PacelineError"
        assert words.format(rank) in text


@pytest.mark.parametrize("what", ["store", "worker"])
def test_closing_twice_and_reading_weights_after_it_are_no_errors(found, what):
    for worker in found:
        assert worker[what]["closed twice"] == []
        assert worker[what]["read"] == []


def test_a_namespace_that_was_closed_starts_anew():
    with LocalJob(2, 1, timeout_s=20) as job:
        for value in job.run(a_namespace_is_used_again):
            assert value == [2.0] * 5, "the sum of the second store's round"
