"""Which keys a store compresses: others are refused by name, before anything is pushed."""

from __future__ import annotations

import pytest
import torch

from paceline import DistributedOptimizer
from paceline.testing.one_process import OneProcess

TWO_BITS = {"type": "2bit", "threshold": 1.0}
WORDS = "key 'weight' is torch.float64, but compressed pushes need float32, float16 or bfloat16; convert it"


@pytest.mark.parametrize("update", ["server", "worker"])
def test_optimizer_names_a_parameter_that_no_codec_takes(update: str) -> None:
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1).double()
    with pytest.raises(TypeError, match=WORDS):
        DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), store, model=net, update=update, compression=TWO_BITS
        )


def test_store_names_a_key_that_no_codec_takes_whichever_is_set_first() -> None:
    [store] = OneProcess("a").stores()
    store.set_gradient_compression(TWO_BITS)
    with pytest.raises(TypeError, match=WORDS):
        store.init(["bias", "weight"], [torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
    store.init("bias", torch.zeros(2))
    [store] = OneProcess("a").stores()
    store.init("weight", torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=WORDS):
        store.set_gradient_compression(TWO_BITS)
    out = torch.empty(2, dtype=torch.float64)
    store.pushpull("weight", torch.full((2,), 0.1, dtype=torch.float64), out)
    assert out.tolist() == [0.1, 0.1]


def test_rows_of_any_dtype_go_beside_compressed_keys() -> None:
    """They are never compressed."""
    [store] = OneProcess("a").stores()
    rows = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.full((1, 2), 0.1, dtype=torch.float64), (3, 2), check_invariants=True
    )
    store.set_gradient_compression(TWO_BITS)
    store.init("table", rows)
    store.push("table", rows)
    out = torch.empty(3, 2, dtype=torch.float64)
    store.pull("table", out)
    assert out.tolist() == [[0.0, 0.0], [0.1, 0.1], [0.0, 0.0]]
