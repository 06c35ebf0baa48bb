"""Workers that set up different things all say at once what differs; a key that worker 0 never has is named."""

import time

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, kvstore
from paceline.errors import PacelineError
from paceline.gluon import Trainer, replicate
from paceline.testing import LocalJob

#: Far below every deadline of these jobs.
SOON_S = 30.0

# ---- what runs in the workers --------------------------------------------------------------------------------------


def network(kind, rank):
    layers = [("first", nn.Linear(4, 3)), ("second", nn.Linear(3, 2))]
    if kind == "extra layer" and rank == 0:
        layers.append(("third", nn.Linear(2, 2)))
    if kind == "extra key" and rank == 1:
        layers.append(("gate", nn.Linear(2, 1, bias=False)))
    if kind == "shape" and rank == 1:
        layers[1] = ("second", nn.Linear(3, 5))
    if kind == "order" and rank == 1:
        layers.reverse()
    net = nn.Module()
    for name, layer in layers:
        net.add_module(name, layer)
    return net.double() if kind == "dtype" and rank == 1 else net


def optimizer_for(kind, rank, params):
    if kind == "optimizer" and rank == 1:
        return torch.optim.Adam(params, lr=0.1)
    # Machines that are not alike may compute differently.
    return torch.optim.SGD(params, lr=0.2 if kind == "rate" and rank == 1 else 0.1, fused=rank == 1)


def resumed(kind, rank, optimizer):
    """Load the state of an earlier run, where this kind says so."""
    if kind != "state" or rank != 0:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)


def set_up(kind, front_door):
    """Set up what differs on one of the workers; return (error, text, seconds) of what came of it."""
    # "store" is about the names that stores get by themselves.
    names = {} if kind == "store" else {"namespace": f"{kind} {front_door}"}
    store = kvstore.create("dist_sync", **names)
    net = network(kind, store.rank)
    optimizer = optimizer_for(kind, store.rank, net.parameters())
    resumed(kind, store.rank, optimizer)
    store.barrier()
    if kind == "store":  # worker 1 has created one more
        store = [kvstore.create("dist_sync") for _ in range(2 if store.rank == 1 else 1)][-1]
    started = time.monotonic()
    try:
        if front_door == "trainer":
            Trainer(replicate(net, ["cpu"]), optimizer, kvstore=store)
        else:
            merging = DistributedOptimizer(optimizer, store, model=net)
            net.second(net.first(torch.ones(1, 4))).sum().backward()
            merging.step()
    except PacelineError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def set_up_all():
    """Set up everything, each by both front doors; what counts stores comes last."""
    return {f"{kind} {door}": set_up(kind, door) for kind, door in [*WAYS, *(("same", door) for door in DOORS), LAST]}


def init_unlike_keys():
    """Worker 0 initialises 'w' and 'bias', worker 1 'w' and 'gain'."""
    store = kvstore.create("dist_sync")
    store.init("w", torch.zeros(2))
    started = time.monotonic()
    if store.rank == 0:
        store.init("bias", torch.zeros(2))
        store.session.gather("done", b"", 30.0)
        return []
    try:
        store.init("gain", torch.zeros(2))
    except PacelineError as error:
        store.session.gather("done", b"")
        return [type(error).__name__, str(error), time.monotonic() - started]
    return []


# ---- tests ---------------------------------------------------------------------------------------------------------

SAYS = {
    "extra layer": (
        "KeyMismatchError",
        "worker 0 has parameter 'third.weight' (2, 2) float32",
        "which workers 1-2 do not have",
    ),
    "extra key": ("KeyMismatchError", "worker 1 has parameter 'gate.weight' (1, 2) float32", "workers 0, 2 do not"),
    "shape": ("KeyMismatchError", "parameter 'second.weight' is (2, 3) float32", "(5, 3) float32"),
    "dtype": ("KeyMismatchError", "parameter 'first.weight' is (3, 4) float32", "(3, 4) float64"),
    "order": ("KeyMismatchError", "the order differs from position 0 on", "parameter 'second.weight' on worker 1"),
    "rate": ("ConfigError", "lr of param group 0 is 0.1 on workers 0, 2 and 0.2 on worker 1"),
    "store": ("ConfigError", "the store's name, by the order of creation, is kv1", "on workers 0, 2 and kv2"),
    "state": (
        "ConfigError",
        "worker 0 has the optimizer's state of 'first.weight' = {momentum_buffer: (3, 4) float32}",
        "which workers 1-2 do not have",
    ),
    "optimizer": (
        "ConfigError",
        "the optimizer is ",
        "on workers 0, 2 and ",
        "worker 1 has eps of param group 0 = 1e-08, which",
    ),
}


DOORS, LAST = ("optimizer", "trainer"), ("store", "optimizer")
WAYS = [(kind, door) for kind in SAYS for door in DOORS if kind != "store" and (kind, door) != ("state", "trainer")]


@pytest.fixture(scope="module")
def found():
    with LocalJob(num_workers=3, num_servers=1) as job:
        return job.run(set_up_all)


@pytest.mark.parametrize(("kind", "front_door"), [*WAYS, LAST])
def test_all_workers_say_at_once_what_differs_between_whom(found, kind, front_door):
    said = [worker[f"{kind} {front_door}"] for worker in found]
    expected, *parts = SAYS[kind]
    assert [one for one, _, _ in said] == [expected] * 3
    assert len({text for _, text, _ in said}) == 1
    for part in parts:
        assert part in said[0][1]
    assert max(seconds for _, _, seconds in said) < SOON_S


@pytest.mark.parametrize("front_door", DOORS)
def test_workers_that_agree_go_on(found, front_door):
    assert [worker[f"same {front_door}"][0] for worker in found] == [""] * 3


def test_wait_for_a_key_that_worker_0_never_has_names_what_it_has_instead():
    with LocalJob(num_workers=2, num_servers=1, start_timeout_s=3.0) as job:
        kind, text, took_s = job.run(init_unlike_keys)[1]
    assert kind == "DeadlineError"
    assert "worker 1: worker 0 did not initialise key 'gain' of store" in text
    assert "within 3 s; it has key 'bias' instead" in text
    assert took_s < SOON_S
