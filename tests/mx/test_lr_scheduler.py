"""Schedules give MXNet's rates, start at the optimizer's rate, and do not depend on the updates before."""

from __future__ import annotations

import pytest
import torch

from paceline import gluon, kvstore
from paceline.mx import lr_scheduler
from paceline.mx.context import cpu

#: Rates of MXNet 1.9 for updates 1 to 8.
RATES = [
    (lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.8), [0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2, 0.2]),
    (lr_scheduler.FactorScheduler(2, 0.1, 0.05, base_lr=1.0), [1.0, 1.0, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05]),
    (lr_scheduler.MultiFactorScheduler([2, 5], 0.1, base_lr=1.0), [1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]),
    (lr_scheduler.PolyScheduler(4, 1.6, pwr=1, final_lr=0.4), [1.3, 1.0, 0.7, 0.4, 0.4, 0.4, 0.4, 0.4]),
    (lr_scheduler.CosineScheduler(4, 1.0), [0.853553, 0.5, 0.146447, 0, 0, 0, 0, 0]),
    (
        lr_scheduler.PolyScheduler(8, 1.0, pwr=1, warmup_steps=4, warmup_begin_lr=0.2),
        [0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25, 0.0],
    ),
    (
        lr_scheduler.MultiFactorScheduler([5], 0.5, base_lr=1.0, warmup_steps=3, warmup_mode="constant"),
        [0, 0, 1, 1, 1, 0.5, 0.5, 0.5],
    ),
]


@pytest.mark.parametrize(("schedule", "rates"), RATES)
def test_rates_of_updates(schedule, rates):
    assert [schedule(update) for update in range(1, 9)] == pytest.approx(rates, abs=1e-6)
    assert schedule(2) == pytest.approx(rates[1])


@pytest.mark.parametrize("where", ["trainer", "store"])
def test_schedule_starts_at_the_rate_of_the_optimizer(where):
    options = {"learning_rate": 0.5, "lr_scheduler": lr_scheduler.FactorScheduler(1, 0.5)}
    if where == "store":
        store = kvstore.create("local")
        store.set_optimizer("sgd", **options)
        store.init("w", torch.zeros(1))
        for _ in range(2):
            store.push("w", torch.ones(1))
        store.pull("w", value := torch.zeros(1))
        assert value.item() == -0.75
        return
    net = gluon.replicate(torch.nn.Linear(1, 1, bias=False), cpu())
    net.initialize(torch.nn.init.zeros_)
    trainer = gluon.Trainer(net, "sgd", options)
    for _ in range(2):
        net(torch.ones(1, 1)).sum().backward()
        trainer.step(1)
    assert net.state_dict()["weight"].item() == -0.75


@pytest.mark.parametrize(
    "make",
    [
        lambda: lr_scheduler.FactorScheduler(0),
        lambda: lr_scheduler.FactorScheduler(1, 1.5),
        lambda: lr_scheduler.MultiFactorScheduler([]),
        lambda: lr_scheduler.MultiFactorScheduler([3, 3]),
        lambda: lr_scheduler.CosineScheduler(5, warmup_steps=5),
        lambda: lr_scheduler.CosineScheduler(5, 0.1, warmup_begin_lr=0.2),
        lambda: lr_scheduler.CosineScheduler(5, warmup_mode="cubic"),
    ],
)
def test_impossible_schedules_are_refused(make):
    with pytest.raises(ValueError, match=r"step|factor|max_update|warm"):
        make()
