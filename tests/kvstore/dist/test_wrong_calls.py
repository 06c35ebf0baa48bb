"""Calls of distributed stores with wrong arguments: an error that names the key, before anything is sent."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import KeyMismatchError
from paceline.kvstore.dist import DistStore
from paceline.testing.one_process import OneProcess


@pytest.fixture
def store() -> DistStore:
    [made] = OneProcess("a", servers="aa").stores()
    made.set_updater("add")
    made.init(["weight", "bias"], [torch.zeros(2), torch.zeros(2)])
    return made


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.float16, torch.int64])
def test_push_of_another_dtype_is_refused_as_by_stores_of_one_process(store: DistStore, dtype: torch.dtype) -> None:
    """Of complex values the imaginary part was lost."""
    fine, wrong, words = torch.ones(2), torch.ones(2, dtype=dtype), "key 'bias' has dtype torch.float32, but the pushed"
    out = [torch.ones(2), torch.ones(2)]
    for again in (False, True):  # the second call is one with a known plan
        with pytest.raises(ValueError, match=words):
            store.push(["weight", "bias"], [fine, wrong])
        with pytest.raises(ValueError, match=words):
            store.push("bias", [fine, wrong])
        store.pull(["weight", "bias"], out)
        assert [one.tolist() for one in out] == [[2 * again] * 2] * 2
        store.push(["weight", "bias"], [torch.full((2,), 2.0), torch.full((2,), 2.0)] if not again else [fine, fine])
    store.set_values("bias", torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(("key", "words"), [("wieght", "did you mean 'weight'"), ("x" * 9, "call init first")])
def test_unknown_key_comes_with_the_nearest_one(store: DistStore, key: str, words: str) -> None:
    with pytest.raises(KeyMismatchError, match=words):
        store.push(key, torch.ones(2))


@pytest.mark.parametrize(
    ("key", "words"), [("k" * 1025, "has 1025 characters; those of a .* have up to 1024"), ("\ud800", "cannot be sent")]
)
def test_name_that_no_message_can_carry_is_refused(store: DistStore, key: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        store.init(["fine", key], [torch.ones(2), torch.ones(2)])
    store.init(["fine", "k" * 1024], [torch.ones(2), torch.ones(2)])
