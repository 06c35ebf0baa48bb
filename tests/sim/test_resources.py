"""Links shared by flows."""

from __future__ import annotations

import pytest
import simpy

from paceline.sim.resources import Processor, SharedLink, call_later


def test_flows_share_a_link_alike() -> None:
    """10 bytes alone for 0.5 s, then with 2 more: 5 and 2 at half the rate, so these end at 0.9 s, those at 1.2 s."""
    environment = simpy.Environment()
    link, ends = SharedLink(environment, 10.0), {}
    link.send(10, lambda: ends.update(long=environment.now))
    call_later(environment, 0.5, lambda: link.send(2, lambda: ends.update(short=environment.now)))
    environment.run()
    assert ends == {"short": pytest.approx(0.9), "long": pytest.approx(1.2)}
    assert link.bytes == 12


def test_flows_of_one_size_end_together_and_count_as_many() -> None:
    """3 flows of 10 bytes beside one of 4 get a quarter each; that one ends at 1.6 s, and they at 3.4 s."""
    environment = simpy.Environment()
    link, ends = SharedLink(environment, 10.0), {}
    link.send(10, lambda: ends.update(three=environment.now), 3)
    link.send(4, lambda: ends.update(one=environment.now))
    environment.run()
    assert ends == {"one": pytest.approx(1.6), "three": pytest.approx(3.4)}
    assert link.bytes == 34


def test_rest_of_a_flow_that_the_clock_cannot_wait_for_counts_as_sent() -> None:
    """In the smallest step of the clock, a fast link carries more than rounding leaves of a flow."""
    environment = simpy.Environment(initial_time=6.0)
    link, ends = SharedLink(environment, 1e9), []
    for size in (20, 40):
        link.send(size, lambda: ends.append(environment.now))
    for _ in range(20):
        if environment.peek() < float("inf"):
            environment.step()
    assert ends == [pytest.approx(6 + 40e-9), pytest.approx(6 + 60e-9)]


def test_link_without_a_limit_takes_no_time() -> None:
    environment = simpy.Environment()
    ends: list[float] = []
    SharedLink(environment, float("inf")).send(1e12, lambda: ends.append(environment.now))
    assert ends == [0]


def test_processor_serves_in_order() -> None:
    environment = simpy.Environment()
    processor, ends = Processor(environment), []
    for seconds in (2.0, 1.0, 0.0):
        processor.work(seconds, lambda: ends.append(environment.now))
    call_later(environment, 5.0, lambda: processor.work(1.0, lambda: ends.append(environment.now)))
    environment.run()
    assert ends == [2, 3, 3, 6]
