"""Servers measure themselves where keys are placed by their speeds."""

from __future__ import annotations

import torch

import paceline
from paceline.testing import LocalJob


def place_keys():
    store = paceline.kvstore.create("dist_sync")
    store.init(["low", "high"], [torch.zeros(8), torch.ones(8)])
    store.pull(["low", "high"], out := [torch.empty(8), torch.empty(8)])
    return [server.speed for server in store.session.servers], [one.sum().item() for one in out]


def test_servers_measure_themselves_for_layered_placement_only():
    with LocalJob(num_workers=1, num_servers=2, placement="layered") as job:
        ((speeds, sums),) = job.run(place_keys)
    assert min(speeds) > 1e6, "a host sums more than a million elements a second"
    assert sums == [0, 8]
    with LocalJob(num_workers=1, num_servers=2) as job:
        ((speeds, sums),) = job.run(place_keys)
    assert speeds == [0, 0]
    assert sums == [0, 8]
