"""``paceline.mx``: MXNet's spellings of what paceline has, and errors that say what to use for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from paceline import mx
from paceline.updaters import MXNetSGD


def test_names_are_those_of_paceline() -> None:
    assert mx.kv is mx.kvstore is paceline.kvstore
    assert mx.gluon.Trainer is paceline.gluon.Trainer
    assert mx.gluon.utils.split_and_load is paceline.gluon.split_and_load
    assert mx.gluon.utils.clip_global_norm is paceline.gluon.clip_global_norm
    assert mx.mod.Module is mx.module.Module is paceline.Module
    assert (mx.cpu(1), mx.num_gpus, mx.Context) == (paceline.cpu(1), paceline.num_gpus, paceline.Context)
    assert mx.callback.Speedometer(frequent=2)
    assert mx.metric.create("loss")
    assert set(dir(mx)) == set(mx.__all__) == {name for name in mx.__all__ if getattr(mx, name)}


def test_script_in_the_spelling_of_mxnet_trains() -> None:
    """The loop of the Gluon book; the layers are torch's."""
    torch.manual_seed(0)
    devices = [mx.cpu(0), mx.cpu(1)]
    net = mx.gluon.replicate(torch.nn.Linear(3, 1), devices)
    options = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = mx.gluon.Trainer(net.collect_params(), mx.optimizer.SGD, options, kvstore=mx.kv.create("device"))
    x = torch.randn(8, 3)
    y, losses = x.sum(1, keepdim=True), []
    for _ in range(60):
        data, label = mx.gluon.utils.split_and_load(x, devices), mx.gluon.utils.split_and_load(y, devices)
        with mx.autograd.record():
            loss = [(net(one) - wanted).square().sum() for one, wanted in zip(data, label, strict=True)]
        mx.autograd.backward(loss)
        trainer.step(batch_size=len(x))
        losses.append(float(sum(loss).detach()))
    assert losses[-1] < 1e-3 * losses[0]
    assert isinstance(trainer.optimizer, type)
    assert issubclass(trainer.optimizer, MXNetSGD)


def test_nothing_is_recorded_in_a_pause() -> None:
    with mx.autograd.pause():
        assert not mx.autograd.is_recording()
        with mx.autograd.record():
            assert mx.autograd.is_recording()
    with pytest.raises(ValueError, match=r"net\.eval\(\)"):
        mx.autograd.record(train_mode=False)


@pytest.mark.parametrize(
    ("room", "name", "text"),
    [
        (mx, "nd", "module 'paceline.mx' has no attribute 'nd'; use torch"),
        (mx, "sym", "use a torch.nn.Module"),
        (mx.optimizer, "create", "use the name and the options themselves"),
        (mx, "kvstor", "did you mean 'kvstore'"),
        (mx.gluon, "rnn", "'paceline.mx.gluon' has no attribute 'rnn'; use torch.nn"),
        (mx.gluon, "Trainr", "did you mean 'Trainer'"),
        (paceline.gluon, "rnn", "use torch.nn"),
        (mx.metric, "F1", "use torchmetrics'"),
        (mx.optimizer, "FTML", "'paceline.mx.optimizer' has no attribute 'FTML'; known are .*SGD"),
    ],
)
def test_names_that_are_not_here_say_what_to_use(room: object, name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(room, name)


def test_methods_that_networks_do_not_have_say_what_to_use() -> None:
    net: Any = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(2, in_units=3))
    replicated: Any = mx.gluon.replicate(net, mx.cpu())
    for one in (net, replicated):
        with pytest.raises(AttributeError, match=r"no attribute 'hybridize'; use torch\.compile"):
            one.hybridize()
        with pytest.raises(AttributeError, match=r"no attribute 'save_parameters'; use torch.save\(net.state_dict"):
            one.save_parameters("file")
    with pytest.raises(AttributeError, match="did you mean 'collect_params'"):
        replicated.colect_params()
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'other'"):
        net.other()
