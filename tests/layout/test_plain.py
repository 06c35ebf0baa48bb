import json
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.layout.plain import Packer, unpack

KEYS = st.integers() | st.text(max_size=5)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
DATA = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


def there_and_back(data):
    packer = Packer()
    text = json.dumps(packer.pack(data, "it"))
    return unpack(json.loads(text), packer.tensors)


@given(DATA)
def test_plain_data_come_back_as_they_were(data):
    found = there_and_back(data)
    assert found == data
    assert repr(found) == repr(data)


def test_tensors_keep_their_places_and_have_names_that_say_them():
    packer = Packer()
    data = {"ema": {"w": torch.ones(2)}, 3: [torch.zeros(1), (torch.tensor(2), "x")]}
    found = unpack(json.loads(json.dumps(packer.pack(data, "extra"))), packer.tensors)
    assert set(packer.tensors) == {"extra/ema/w", "extra/3/0", "extra/3/1/0"}
    assert found["ema"]["w"].tolist() == [1, 1]
    assert found[3][1][0].item() == 2


def test_equal_names_of_unlike_things_do_not_meet():
    data = {"1": torch.zeros(1), 1: torch.ones(1), "a/b": torch.tensor(2.0), "a": {"b": torch.tensor(3.0)}}
    found = there_and_back(data)
    assert [found["1"].item(), found[1].item(), found["a/b"].item(), found["a"]["b"].item()] == [0, 1, 2, 3]


def test_what_shares_memory_is_written_once():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    packer = Packer()
    packed = packer.pack({"net": net.state_dict(), "column": net[0].weight[:, 0]}, "it")
    assert set(packer.tensors) == {"it/net/0.weight", "it/net/0.bias", "it/net/1.bias", "it/column"}
    assert torch.equal(unpack(packed, packer.tensors)["net"]["1.weight"], net[0].weight)


def test_counters_numpy_numbers_and_ordered_dictionaries():
    found = there_and_back({"c": Counter({30: 1, 80: 2}), "n": np.float32(0.5), "o": OrderedDict(b=1, a=2)})
    assert isinstance(found["c"], Counter)
    assert found == {"c": Counter({30: 1, 80: 2}), "n": 0.5, "o": {"b": 1, "a": 2}}
    assert list(found["o"]) == ["b", "a"]


@pytest.mark.parametrize("wrong", [object(), print, {1, 2}, b"raw", nn.Linear(1, 1), {(1, 2): 3}, {True: 1}])
def test_what_is_not_plain_is_named(wrong):
    with pytest.raises(TypeError, match=r"extra/list/1"):
        Packer().pack({"list": [0, wrong]}, "extra")


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    ],
)
def test_schedulers_of_torch_go_on(make):
    def steps(scheduler, optimizer, count):
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def new():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        return make(optimizer), optimizer

    whole = steps(*new(), 8)
    scheduler, optimizer = new()
    steps(scheduler, optimizer, 3)
    states = there_and_back([scheduler.state_dict(), optimizer.state_dict()])
    scheduler, optimizer = new()
    scheduler.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert steps(scheduler, optimizer, 5) == whole[3:]
