"""Buffers that a script loads are not overwritten by those of rank 0's last step, which come later."""

import torch
from torch import nn

from paceline import kvstore
from paceline.gluon import Trainer, replicate
from paceline.mx.context import cpu
from paceline.testing import LocalJob


def train():
    """Train, load the state of the start, and evaluate; return the means before and after."""
    store = kvstore.create("dist_sync")
    torch.manual_seed(store.rank)
    net = replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), cpu())
    trainer = Trainer(net, "sgd", {"lr": 0.1}, store, update_on_kvstore=False)
    first = {name: one.clone() for name, one in net.state_dict().items()}
    for _ in range(3):
        net(torch.randn(5, 3)).square().sum().backward()
        trainer.step(5)
    net.load_state_dict(first)
    net.eval()
    return [one.tolist() for one in (first["1.running_mean"], net.replicas[0][1].running_mean)]


def test_loaded_buffers_stay():
    with LocalJob(2, 1) as job:
        for before, after in job.run(train):
            assert after == before
