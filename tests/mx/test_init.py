"""Initial values: MXNet's scales, the same on all devices, biases 0, and also before shapes are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paceline import gluon, mx

TWO = [mx.cpu(0), mx.cpu(1)]


@pytest.mark.parametrize(
    ("init", "deviation", "largest"),
    [
        (mx.init.Xavier(), math.sqrt(3 / 2250) / math.sqrt(3), math.sqrt(3 / 2250)),
        (mx.init.Xavier("gaussian", "in", 2), math.sqrt(2 / 2700), None),
        (mx.init.Xavier("gaussian", "out", 2), math.sqrt(2 / 1800), None),
        (mx.init.MSRAPrelu(slope=0.0), math.sqrt(2 / 2250), None),
        (mx.init.Normal(0.5), 0.5, None),
        (mx.init.Uniform(0.3), 0.3 / math.sqrt(3), 0.3),
        (mx.init.One(), 0.0, 1.0),
        (mx.init.Zero(), 0.0, 0.0),
        (nn.init.ones_, 0.0, 1.0),
    ],
)
def test_scale_of_weights(init, deviation, largest):
    torch.manual_seed(0)
    init(weight := torch.full((200, 300, 3, 3), math.nan))
    assert weight.std().item() == pytest.approx(deviation, rel=0.01, abs=1e-9)
    if largest is not None:
        assert weight.abs().max().item() == pytest.approx(largest, rel=0.01)


def test_orthogonal_rows():
    mx.init.Orthogonal(2.0)(weight := torch.empty(3, 5))
    assert torch.allclose(weight @ weight.T, 4 * torch.eye(3), atol=1e-5)


@pytest.mark.parametrize("lazy", [False, True])
def test_all_devices_get_the_values_and_biases_become_zero(lazy):
    first = nn.LazyLinear(4) if lazy else nn.Linear(3, 4)
    net = gluon.replicate(nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 2)), TWO)
    net.initialize(mx.init.Constant(0.5), ctx=TWO)
    trainer = gluon.Trainer(net, "sgd", {"lr": 0.0}, "local", update_on_kvstore=True)
    gluon.backward([one.sum() for one in net(gluon.split_and_load(torch.rand(8, 3), TWO))])
    trainer.step(8)
    for replica in net.replicas:
        state = dict(replica.named_parameters())
        assert all((state[name] == 0.5).all() for name in ("0.weight", "2.weight"))
        assert all((state[name] == 0).all() for name in ("0.bias", "1.bias", "2.bias"))
        assert (state["1.weight"] == 1).all()


def test_other_devices_and_other_kinds_are_refused():
    net = gluon.replicate(nn.Linear(1, 1), TWO)
    with pytest.raises(ValueError, match=r"ctx is \[cpu\(0\)\]; replicate put the network on \[cpu\(0\), cpu\(1\)\]"):
        net.initialize(mx.init.Zero(), ctx=mx.cpu(0))
    with pytest.raises(ValueError, match="'uniform' or 'gaussian'"):
        mx.init.Xavier("normal")
