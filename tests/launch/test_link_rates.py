"""The rates of links between hosts; here all workers are in one process."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest

from paceline.launch import link_rates
from paceline.launch.link_rates import MARK, LinkRates, pairs, parse_links, steady_rate
from paceline.net.security import new_job_key


def free_address() -> str:
    from paceline.net.endpoints import listen

    sock, address = listen("tcp://127.0.0.1:*")
    sock.close()
    return address


def test_worker_0_gets_the_rate_of_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_rates, "MEASURE_S", 0.1)
    monkeypatch.setattr(link_rates, "SETTLING_S", 0.02)
    key, leader = new_job_key(), free_address()
    workers = [LinkRates(rank, 3, key, leader if rank == 0 else "tcp://127.0.0.1:*", leader) for rank in range(3)]
    others = [threading.Thread(target=lambda one=one: list(one.run())) for one in workers[1:]]
    for one in others:
        one.start()
    found = list(workers[0].run())
    for one in others:
        one.join(10.0)
        assert not one.is_alive()
    assert [pair[:2] for pair in found] == [(0, 1), (0, 2), (1, 2)]
    assert all(rate > 1e5 and 0 < trip < 5 for _, _, rate, trip in found)


def test_pairs_are_read_from_output_with_other_lines() -> None:
    lines = [f"[worker 0] {MARK}{json.dumps([0, 1, 1e6, 0.1])}", "[worker 1] hello", "note"]
    assert parse_links("\n".join(lines)) == {(0, 1): (1e6, 0.1)}
    assert parse_links("nothing") == {}


def test_bytes_that_pass_at_once_do_not_count() -> None:
    burst = [(0.01, 1_000_000)]
    steady = [(0.1 * step, 1_000_000 + 10_000 * step) for step in range(1, 8)]
    assert steady_rate(burst + steady) == pytest.approx(100_000)
    assert steady_rate([(4.0, 65536)]) == 16384, "one message took all the time"


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_all_pairs_of_few_hosts_are_measured(count: int) -> None:
    assert pairs(count) == [(one, other) for one in range(count) for other in range(one + 1, count)]


@pytest.mark.parametrize("count", [9, 20, 100])
def test_every_one_of_many_hosts_is_in_some_pairs(count: int) -> None:
    found = pairs(count)
    assert len(found) <= max(link_rates.MOST_PAIRS, count)
    assert min(Counter(one for pair in found for one in pair).values()) >= 2
    assert len(Counter(one for pair in found for one in pair)) == count
