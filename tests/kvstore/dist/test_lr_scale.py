"""The learning rate as that of an update or of a sample, on servers."""

from __future__ import annotations

import pytest
import torch

from paceline.consistency import Policy
from paceline.testing.one_process import OneProcess


@pytest.mark.parametrize(("lr_scale", "value"), [("update", 4.0), ("sample", 2.0)])
def test_servers_step_by_the_part_of_one_batch_of_every_worker(lr_scale: str, value: float) -> None:
    policy = Policy("each", lr_scale=lr_scale)  # type: ignore[arg-type]
    stores = OneProcess("aa").stores(policy)
    for store in stores:
        store.set_optimizer("add")
        store.init("w", torch.zeros(3))
    out = torch.empty(3)
    for store in (*stores, *stores):
        store.push("w", torch.ones(3))
        store.pull("w", out)
    assert out.tolist() == [value] * 3
    assert stores[0].stats()["step_mass"] == value
