"""Values that a worker sets on the servers reach all workers, whatever way they read."""

from __future__ import annotations

import pytest
import torch

from paceline.consistency import Policy
from paceline.errors import PacelineError
from paceline.kvstore.dist import DistStore
from paceline.testing.one_process import OneProcess
from paceline.wire import messages as m

KEYS, NUMEL = ["a", "b", "c"], 6
POLICIES = {
    "all": Policy("all"),
    "each": Policy("each"),
    "groups": Policy("groups", ((0, 1), (2, 3))),
    "first": Policy("first", first=2),
}
PLACES = {
    "shared memory": ("aaaa", "a", True),
    "frames": ("aaaa", "a", False),
    "two servers": ("aaaa", "aa", True),
    "local merge": ("aabb", "ab", True),
    "local merge by frames": ("aabb", "ab", False),
}


def new_stores(place: str, merge: str, codec: str = "", dtype: torch.dtype = torch.float32) -> list[DistStore]:
    workers, servers, shared = PLACES[place]
    # Keys are cut over servers and buckets.
    stores = OneProcess(workers, servers, shared_memory=shared, bigarray_bound=8).stores(POLICIES[merge], mean=True)
    for store in stores:
        store.set_optimizer("sgd", lr=1.0, multi_precision=dtype != torch.float32)
    for store in stores if codec else ():
        store.set_gradient_compression({"type": codec, "leg": "pull"})
    for store in stores:
        store.init([*KEYS, "large"], [*[torch.zeros(NUMEL, dtype=dtype)] * 3, torch.zeros(50, dtype=dtype)])
    return stores


def push(stores: list[DistStore], value: float = 1.0) -> None:
    for store in stores:
        store.push([*KEYS, "large"], [*[torch.full((NUMEL,), value)] * 3, torch.full((50,), value)])
    for store in stores:
        pull(store)


def pull(store: DistStore) -> list[float]:
    outs = [*[torch.zeros(NUMEL) for _ in KEYS], torch.zeros(50)]
    store.pull([*KEYS, "large"], outs)
    return [out.unique().item() if out.unique().numel() == 1 else float("nan") for out in outs]


@pytest.mark.parametrize("merge", POLICIES)
@pytest.mark.parametrize("place", PLACES)
def test_every_worker_pulls_what_one_has_set(place: str, merge: str) -> None:
    stores = new_stores(place, merge)
    push(stores)
    stores[0].set_values(["b", "large"], [torch.full((NUMEL,), 7.0), torch.full((50,), 8.0)])
    kept = pull(stores[0])[0]
    for store in stores:
        store.barrier()
    found = [pull(store) for store in stores]
    assert [(one[1], one[3]) for one in found] == [(7.0, 8.0)] * 4
    assert kept == found[0][0]
    assert kept != 7.0
    # And training goes on from there.
    push(stores, 0.0)
    assert [pull(store)[1] for store in stores] == [7.0] * 4


@pytest.mark.parametrize("merge", POLICIES)
@pytest.mark.parametrize("place", ["shared memory", "frames"])
def test_readers_by_differences_follow(place: str, merge: str) -> None:
    stores = new_stores(place, merge, "int8")
    push(stores)
    stores[1].set_values("b", torch.full((NUMEL,), 7.0))
    push(stores, 0.0)  # without a pull between
    for store in stores:
        store.barrier()
    assert [pull(store)[1] for store in stores] == [7.0] * 4


def test_masters_of_small_types_follow() -> None:
    stores = new_stores("shared memory", "all", dtype=torch.bfloat16)
    push(stores)
    stores[0].set_values("a", torch.full((NUMEL,), 3.0))
    push(stores, 0.0)
    assert [pull(store)[0] for store in stores] == [3.0] * 4


def test_what_was_pushed_before_does_not_change_what_is_set() -> None:
    [store] = OneProcess("a").stores(POLICIES["each"])
    store.set_optimizer("sgd", lr=1.0)
    store.init("a", torch.zeros(NUMEL))
    for _ in range(3):
        store.push("a", torch.ones(NUMEL))
        store.set_values("a", torch.full((NUMEL,), 5.0))
        out = torch.zeros(NUMEL)
        store.pull("a", out)
        assert out.tolist() == [5.0] * NUMEL


def test_values_of_another_shape_are_refused_here_and_there() -> None:
    [store] = OneProcess("a").stores()
    store.init(["a", "b"], [torch.zeros(NUMEL)] * 2)
    with pytest.raises(ValueError, match="shape"):
        store.set_values("a", torch.ones(2))
    for entries, frames in (
        ([m.Entry(0, 0, 0, NUMEL, 0), m.Entry(0, 0, NUMEL, NUMEL, 0)], [b"\0" * 24, b"\0" * 20]),
        ([m.Entry(0, 0, 0, 3 * NUMEL, 0)], [b"\1" * 72]),
        ([m.Entry(0, 0, 0, NUMEL, 0)], []),
        ([m.Entry(0, 3, 0, NUMEL, 0)], [b"\1" * 24]),
    ):
        with pytest.raises(PacelineError):
            store.session.wait([store.session.ask_server(0, m.SetValues("s", entries), "setting values", frames)])
    out = torch.ones(NUMEL)
    store.pull("a", out)
    assert out.tolist() == [0.0] * NUMEL
