"""Relative speeds of servers."""

from __future__ import annotations

import pytest

from paceline.hetero.groups import server_speeds
from paceline.layout.placement import KeySize, place


def test_servers_that_are_nearly_alike_have_one_speed() -> None:
    assert server_speeds([100.0, 90.0, 110.0]) == [1.0, 1.0, 1.0]
    fast, slow = server_speeds([50.0, 100.0, 52.0, 105.0])[1::-1]
    assert fast == 1.0
    assert slow == pytest.approx((50 * 52) ** 0.5 / (100 * 105) ** 0.5)


def test_server_that_was_not_measured_counts_as_the_fastest() -> None:
    assert server_speeds([0.0, 100.0, 10.0]) == [1.0, 1.0, pytest.approx(0.1)]
    assert server_speeds([0.0, 0.0]) == [1.0, 1.0]
    assert server_speeds([]) == []


def test_lowest_layers_go_to_the_fastest_server_whatever_its_rank() -> None:
    keys = [KeySize(layer, 100) for layer in range(6)]
    layout = place(keys, 3, bound=100, policy="layered", speeds=server_speeds([10.0, 20.0, 40.0]))
    assert layout.buckets[0].server == 2
    assert layout.buckets[-1].server == 0
