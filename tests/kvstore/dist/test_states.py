"""Files of the state that servers hold: a store that holds none says who does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import DistributedOptimizer
from paceline.testing.one_process import OneProcess


def test_state_of_an_optimizer_in_the_worker_is_not_the_stores_to_save(tmp_path: Path) -> None:
    """Written without it, a file would be complete to the eye, and training would go on with other weights."""
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), store, model=net, update="worker")
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    for call in (
        lambda: store.save_optimizer_states(str(tmp_path / "states")),
        lambda: store.load_optimizer_states(str(tmp_path / "states")),
        store.optimizer_states,
    ):
        with pytest.raises(ValueError, match=r"has no optimizer.*paceline\.save"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_state_of_an_optimizer_on_the_servers_is_saved(tmp_path: Path) -> None:
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), store, model=net, update="server")
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    before = store.optimizer_states()
    store.save_optimizer_states(str(tmp_path / "states"))
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    store.load_optimizer_states(str(tmp_path / "states"))
    after = store.optimizer_states()
    assert before["weight"].keys() == {"exp_avg", "exp_avg_sq", "step"}
    for name, value in before["weight"].items():
        assert torch.equal(after["weight"][name], value)
