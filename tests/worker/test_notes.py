"""Notes that travel with pushes: all workers behind an update hear the same ones, with its answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.kvstore.dist import DistStore
from paceline.testing.one_process import OneProcess

VALUES = [torch.ones(6), torch.ones(3)]


def stores_of(workers: str, servers: str, **settings: Any) -> tuple[OneProcess, list[DistStore]]:
    job = OneProcess(workers, servers, **settings)
    stores = job.stores(mean=True)
    for store in stores:
        store.init(["a", "b"], VALUES)
    return job, stores


def round_of(stores: list[DistStore], **told: bytes) -> list[dict[int, bytes]]:
    """Train for a round of two pushes; returns what each worker has heard with the first one."""
    for store in stores:
        store.traffic.tell(told.get(f"by_{store.rank}", b"of %d" % store.rank))
        store.push("a", VALUES[0])
        store.push("b", VALUES[1])
    return [store.traffic.heard() for store in stores]


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(
    ("workers", "servers"), [("aa", "a"), ("aab", "ab"), ("aabb", "c")], ids=["one host", "local merge", "other host"]
)
def test_all_workers_hear_the_notes_of_all(workers: str, servers: str, shared_memory: bool) -> None:
    _, stores = stores_of(workers, servers, shared_memory=shared_memory)
    for _ in range(2):
        assert round_of(stores) == [{one.rank: b"of %d" % one.rank for one in stores}] * len(stores)


def test_note_goes_with_one_push_and_adds_no_message() -> None:
    job, stores = stores_of("aa", "a")
    before = len(job.requests)
    round_of(stores)
    job.deliver_all()
    pushes = [body for _, _, body in job.requests[before:]]
    assert [body.note for body in pushes if body.note] == [b"of 0", b"of 1"]
    assert len(pushes) == 4


def test_worker_that_has_left_is_missing_for_all_others() -> None:
    _, stores = stores_of("aaa", "aa")
    stores[1].close()
    others = [stores[0], stores[2]]
    assert round_of(others) == [{0: b"of 0", 2: b"of 2"}] * 2


def test_nothing_is_heard_without_a_push() -> None:
    _, (store, other) = stores_of("aa", "a")
    round_of([store, other])
    store.traffic.tell(b"again")
    assert store.traffic.heard() == {}
    for one in (store, other):
        one.push("a", VALUES[0])  # a note that was asked for too early goes nowhere
    assert store.traffic.heard() == {}


def test_notes_survive_an_answer_that_is_given_again_and_keys_that_are_cut() -> None:
    """Keys of one bucket that are pushed apart, then together: the slots of the bucket are cut and joined."""
    _, stores = stores_of("aa", "a")
    round_of(stores)
    for store in stores:
        store.traffic.tell(b"both of %d" % store.rank)
        store.push(["a", "b"], VALUES)
    assert [store.traffic.heard() for store in stores] == [{0: b"both of 0", 1: b"both of 1"}] * 2
