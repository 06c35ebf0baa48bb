"""Stores of several optimizers that share one store: each has the codecs that are meant for it."""

from __future__ import annotations

import pytest
import torch

from paceline.kvstore import KVStore, create
from paceline.testing.one_process import OneProcess

#: Sends nothing of an element of 0.3 in the first push.
COARSE = {"type": "2bit", "threshold": 0.5}


@pytest.fixture(params=["local", "device", "dist_sync"])
def store(request: pytest.FixtureRequest) -> KVStore:
    return OneProcess("a").stores()[0] if request.param == "dist_sync" else create(request.param)


def pushed(store: KVStore) -> float:
    """Return what a push of 0.3 changes."""
    out = torch.zeros(4)
    store.init("w", torch.zeros(4))
    store.push("w", torch.full((4,), 0.3))
    store.pull("w", out=out)
    return round(float(out[0]), 6)


def test_codec_of_the_first_optimizer_is_not_that_of_the_second(store: KVStore) -> None:
    first = store.for_optimizer()
    first.set_gradient_compression(COARSE)
    second, third = store.for_optimizer(), store.for_optimizer()
    third.set_gradient_compression({"type": "2bit", "threshold": 0.2})
    assert (pushed(first), pushed(second), pushed(third)) == (0.0, 0.3, 0.2)


def test_codec_of_the_store_is_that_of_all_optimizers(store: KVStore) -> None:
    store.set_gradient_compression(COARSE)
    assert [pushed(store.for_optimizer()) for _ in range(3)] == [0.0] * 3


def test_optimizer_that_averages_leaves_the_sums_of_the_next_one() -> None:
    store = OneProcess("a").stores()[0]
    assert store.for_optimizer(mean=True) is store
    assert store.for_optimizer().lifecycle.mean is False
    assert OneProcess("a").stores(mean=True)[0].for_optimizer().lifecycle.mean is True
