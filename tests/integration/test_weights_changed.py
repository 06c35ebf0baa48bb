"""Weights that change behind the servers' back are noticed, instead of being overwritten without a word."""

import pytest
import torch

import paceline
from paceline.testing import LocalJob


def change_weights(on_store):
    """Train a step, load other weights, train another step; return what that says."""
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = paceline.DistributedOptimizer(optimizer, "dist_sync", model=net, update_on_kvstore=on_store)
    weights = {name: torch.ones_like(value) for name, value in net.state_dict().items()}
    said = []
    for _ in range(2):
        net(torch.ones(3, 4)).sum().backward()
        try:
            optimizer.step()
            said.append("stepped")
        except paceline.errors.PacelineError as error:
            said.append(str(error))
        optimizer.zero_grad()
        optimizer.synchronize()
        net.load_state_dict(weights)
    return said


@pytest.mark.parametrize("on_store", [True, False])
def test_weights_loaded_after_wrapping_are_an_error_where_servers_hold_the_weights(on_store: bool) -> None:
    with LocalJob(1, 1) as job:
        [said] = job.run(change_weights, on_store, timeout_s=60)
    assert said[0] == "stepped"
    if on_store:
        assert "'weight' was changed in place" in said[1]
        assert "before wrapping" in said[1]
    else:
        assert said[1] == "stepped"
