"""Scaling of a job with each layout of servers: the figures that were published, and the recommendation."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from paceline.compression import make
from paceline.hetero import Speed
from paceline.hetero.local_plan import ELEMENT_BYTES
from paceline.sim import SimulatedCluster, SimulatedWorker
from paceline.sim.models import arrays, even
from paceline.sim.scaling import LAYOUTS, SIZES, Estimate, ExchangePlan, Planner, Training

#: 8 hosts of 8 GPUs that each train ResNet-50 on 760 images a second, in batches of 256, with links of 25 Gbit/s.


def uniform(
    speed: Speed, workers: int, bandwidth: float, server_bandwidth: float, latency_s: float
) -> SimulatedCluster:
    """Return a cluster of workers that are alike."""
    one = SimulatedWorker(speed, bandwidth)
    return SimulatedCluster((one,) * workers, bandwidth=server_bandwidth, latency_s=latency_s)


V100 = uniform(Speed(0.0, 1 / 760), 64, 3.125e9, 3.125e9, 0.0)
PLANNER = Planner(Training(tuple(arrays("resnet50")), V100, 256, 8))


def efficiency(layout: str, count: int = 64, **settings: bool) -> float:
    return PLANNER.estimate(ExchangePlan(layout, merge=True, **settings), count).efficiency


@pytest.mark.parametrize(("count", "percent"), [(8, 84), (16, 72), (32, 56), (64, 39)])
def test_one_server_is_as_slow_as_published(count: int, percent: int) -> None:
    assert efficiency("one server", count) == pytest.approx(percent / 100, abs=0.01)


def test_huge_model_is_placed_in_no_more_parts_than_show_how_even_servers_are() -> None:
    planner = Planner(Training(tuple(even(10**12)), V100))
    for servers, most in ((1, 6000), (3000, 20_000)):
        buckets, largest = planner._placed(servers)
        assert len(buckets) <= most
        assert largest == pytest.approx(1 / servers, rel=0.3)


def test_one_server_gives_38_to_40_percent_and_two_per_host_equal_all_reduce() -> None:
    assert 0.38 <= efficiency("one server") <= 0.40
    assert efficiency("2:1") == pytest.approx(efficiency("all-reduce"), abs=0.02)
    assert efficiency("1:1") < efficiency("2:1")


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_overlap_local_merge_and_balanced_placement_give_90_percent(layout: str) -> None:
    assert efficiency(layout, overlap=True) >= 0.9


def test_servers_without_local_merge_get_eight_times_the_bytes() -> None:
    assert PLANNER.estimate(ExchangePlan("2:1"), 64).efficiency == pytest.approx(0.39, abs=0.01)


def test_one_worker_is_as_fast_as_it_is() -> None:
    for way in (ExchangePlan("all-reduce", overlap=True, merge=True), ExchangePlan("co-located", merge=True)):
        one = PLANNER.estimate(way, 1)
        assert (one.efficiency, one.samples_per_s) == (pytest.approx(1), pytest.approx(760))


def test_costs_count_the_hosts_of_servers() -> None:
    training = Training(tuple(arrays("resnet50")), V100, 256, 8, epoch_samples=36_000, host_price=3.0, server_price=0.5)
    one = Planner(training).estimate(ExchangePlan("2:1", merge=True), 64)
    assert (one.hosts, one.servers, one.server_hosts) == (8, 16, 16)
    assert one.epoch_cost == pytest.approx((8 * 3.0 + 16 * 0.5) * 10 / one.samples_per_s)


def plan_ten_thousand_workers() -> None:
    """Plan, and print the processor time that it took."""
    planner = Planner(Training(tuple(arrays("resnet50")), uniform(Speed(0, 1 / 760), 10_000, 3e9, 3e9, 5e-5), 256, 8))
    before = time.process_time()
    planner.scaling(SIZES)
    planner.ways(10_000, "fp16")
    planner.recommend(10_000, "fp16")
    print(time.process_time() - before)


def test_ten_thousand_workers_are_planned_in_five_seconds() -> None:
    """In a process of its own: measuring the coverage takes longer than planning."""
    code = "from tests.sim.test_scaling import *; plan_ten_thousand_workers()"
    taken = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60).stdout
    assert float(taken) < 5


@pytest.mark.parametrize("codec", ELEMENT_BYTES)
def test_codecs_send_what_is_assumed(codec: str) -> None:
    settings = {"type": codec} | ({"threshold": 0.1} if codec == "2bit" else {})
    built = make(settings)
    assert built is not None
    assert built.encoded_nbytes(1_000_000) == pytest.approx(1e6 * ELEMENT_BYTES[codec], rel=0.02)


def test_cheapest_way_is_recommended_in_two_sentences() -> None:
    found = PLANNER.recommend(64, "fp16")
    assert found.mode == "dist_sync"
    assert found.best.way == ExchangePlan("co-located", overlap=True, merge=True)
    assert found.sentences.startswith("Use dist_sync with 8 servers, one on each host of workers: 99% efficiency, 3")
    assert found.sentences.count(". ") == 1
    options = [PLANNER.estimate(ExchangePlan(layout, True, True), 64) for layout in LAYOUTS]
    assert found.best.epoch_cost <= 1.01 * min(one.epoch_cost for one in options)


def test_compression_is_recommended_where_the_link_is_slow() -> None:
    slow = uniform(Speed(0.0, 1 / 760), 64, 1.25e8, 1.25e8, 5e-5)
    found = Planner(Training(tuple(arrays("resnet50")), slow, 256, 8)).recommend(64, "int8")
    assert found.best.way.compression == "int8"
    assert ", int8 compression: " in found.sentences


def test_servers_of_cheap_hosts_are_recommended_where_they_pay() -> None:
    """Halved traffic of the workers' links is worth more than hosts that cost little."""
    slow = uniform(Speed(0.0, 1 / 760), 64, 3e8, 3e9, 0.0)
    training = Training(tuple(even(25_000_000, 1000)), slow, 256, 8, host_price=10.0, server_price=0.1)
    found = Planner(training).recommend(64, "fp16")
    assert found.best.server_hosts >= 1
    assert "on hosts of their own" in found.sentences or "on a host of its own" in found.sentences


def test_unlike_machines_get_the_mode_that_dist_auto_would_choose() -> None:
    workers = (SimulatedWorker(Speed(0.0, 0.01)),) * 3 + (SimulatedWorker(Speed(0.0, 0.04)),)
    found = Planner(Training(tuple(even(1000)), SimulatedCluster(workers), 32)).recommend(4, "fp16")
    assert found.mode == "dist_sync with batches by speed"


def test_times_of_a_noisy_step_are_those_of_the_slowest() -> None:
    calm, noisy = (SimulatedCluster((SimulatedWorker(Speed(0.0, 0.01)),) * 8, jitter) for jitter in (0.0, 0.1))
    way = ExchangePlan("all-reduce", merge=True)
    one, other = (Planner(Training(tuple(even(1000)), each)).estimate(way, 8) for each in (calm, noisy))
    assert one.efficiency == pytest.approx(1)
    assert other.step_s == pytest.approx(0.32 * 1.15, rel=0.02)
    assert isinstance(other, Estimate)
