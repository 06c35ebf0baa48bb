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


def test_push_of_complex_values_is_refused(store: DistStore) -> None:
    """Their imaginary part was lost."""
    fine, wrong = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    out = [torch.ones(2), torch.ones(2)]
    for again in (False, True):  # the second call is one with a known plan
        for key, value in ((["weight", "bias"], [fine, wrong]), ("bias", [fine, wrong])):
            with pytest.raises(ValueError, match=r"key 'bias' is complex.* torch\.view_as_real"):
                store.push(key, value)
        store.pull(["weight", "bias"], out)
        assert [one.tolist() for one in out] == [[again] * 2] * 2
        store.push(["weight", "bias"], [fine, fine])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_values_of_another_real_dtype_are_converted(store: DistStore, dtype: torch.dtype) -> None:
    """As the gradients of a model that is ``double()`` after some steps."""
    store.push(["weight", "bias"], [torch.ones(2), torch.full((2,), 3, dtype=dtype)])
    store.pull("bias", out := torch.zeros(2))
    assert out.tolist() == [3.0, 3.0]


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


def test_options_without_an_optimizer_are_refused(store: DistStore) -> None:
    """They changed nothing, in silence."""
    with pytest.raises(ValueError, match="updater 'add' has no options to change"):
        store.set_options([{"lr": 0.1}])
    [other] = OneProcess("a").stores()
    with pytest.raises(ValueError, match="has no optimizer, so it has no state or options to change"):
        other.set_options([{"lr": 0.1}])
