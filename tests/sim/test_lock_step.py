"""Steps in lock step over shared links."""

from __future__ import annotations

import pytest

from paceline.consistency import Policy
from paceline.hetero import Speed
from paceline.sim import SimulatedCluster, SimulatedTraining, SimulatedWorker, simulate
from paceline.sim.lock_step import FORWARD, AllReduce, Hosts, Servers, Stage, step_seconds

WHOLE = [Stage(100.0, 1.0)]
FINE = [Stage(1.0, 0.01)] * 100


def test_step_without_overlap_takes_what_the_simulator_of_jobs_says() -> None:
    workers = (SimulatedWorker(Speed(0, 3.0), 50.0),) * 3 + (SimulatedWorker(Speed(0, 1.0), 20.0),) * 2
    cluster = SimulatedCluster(workers, 0, 0, 1, 2, 80.0, 0.25, 0.5, 0.75, 100.0)
    job = simulate(cluster, SimulatedTraining(Policy("all"), batch=1, rounds=7))
    hosts = [Hosts(3, 1, 3.0, 50.0), Hosts(2, 1, 1.0, 20.0)]
    servers = Servers(2, 0.5, 80.0, merge_s=0.5, update_s=0.75)
    step_s = step_seconds(hosts, WHOLE, servers, merges=True, latency_s=0.25)
    # The job adds pushes one by one as they come; here a server begins when all are there.
    assert job.seconds / 7 == pytest.approx(step_s, rel=0.12)
    free = SimulatedCluster(workers, 0, 0, 1, 2, 80.0, 0.25, 0, 0, 100.0)
    job = simulate(free, SimulatedTraining(Policy("all"), batch=1, rounds=7))
    step_s = step_seconds(hosts, WHOLE, Servers(2, 0.5, 80.0), merges=True, latency_s=0.25)
    assert job.seconds / 7 == pytest.approx(step_s, rel=1e-6)


@pytest.mark.parametrize(
    ("exchange", "seconds"),
    [
        (Servers(1, 1.0, 50.0), 4 * 2 + 4 * 2),  # 4 models in, 4 out
        (Servers(4, 0.25, 50.0), 2 + 2),  # as fast as the hosts' own links
        (Servers(4, 0.5, 50.0), 4 + 4),  # one of them holds half of the model
        (Servers(8, 0.125, 10.0), 5 + 5),  # half a model in and out
        (Servers(4, 0.25, 1.0, on_hosts=True), 1.5 + 1.5),  # three quarters leave a host
        (AllReduce(), 2 * 3 / 4 * 2),
    ],
)
def test_exchange_without_overlap_takes_the_time_of_the_busiest_link(
    exchange: Servers | AllReduce, seconds: float
) -> None:
    hosts = [Hosts(4, 2, 3.0, 50.0)]
    assert step_seconds(hosts, WHOLE, exchange, merges=True) == pytest.approx(3 + seconds)


@pytest.mark.parametrize(("holders", "seconds"), [((0, 1), 2 + 2), ((0, 0), 4 + 4), ((None, None), 2 + 2)])
def test_stages_of_one_server_share_its_link(holders: tuple[int | None, int | None], seconds: float) -> None:
    """Two hosts push two halves of a model: to one server each, or both to one, whose link is no faster than theirs."""
    stages = [Stage(50.0, 0.0, holders[0]), Stage(50.0, 1.0, holders[1])]
    hosts = [Hosts(2, 1, 3.0, 50.0)]
    step_s = step_seconds(hosts, stages, Servers(2, 0.5, 50.0), merges=True)
    assert 3 + seconds / 2 <= step_s <= 3 + seconds + 1e-9
    alone = step_seconds(hosts, stages, Servers(2, 0.5, 1e9), merges=True)
    assert (step_s - alone > 1) == (holders == (0, 0))


def test_bucket_of_a_server_beside_a_worker_crosses_the_link_of_the_others_whole() -> None:
    """A worker's push to its own server crosses no link; that of the other one does, and the values come back."""
    stages = [Stage(100.0, 1.0, server=0)]
    for count, seconds in ((1, 0.0), (2, 2 + 2), (4, 3 * 2 + 3 * 2)):
        hosts = [Hosts(1, 1, 3.0, 50.0)] * count
        exchange = Servers(count, 1.0, 50.0, on_hosts=True)
        assert step_seconds(hosts, stages, exchange, merges=True) == pytest.approx(3 + seconds)


def test_buckets_of_servers_beside_workers_share_the_links() -> None:
    """Two hosts exchange halves: each host's link carries one push and one answer at a time in each direction."""
    stages = [Stage(50.0, 0.0, server=0), Stage(50.0, 1.0, server=1)]
    exchange = Servers(2, 0.5, 50.0, on_hosts=True)
    assert step_seconds([Hosts(1, 1, 3.0, 50.0)] * 2, stages, exchange, merges=True) == pytest.approx(3 + 1 + 1)


def test_workers_that_do_not_add_up_push_each_for_itself() -> None:
    hosts = [Hosts(4, 2, 3.0, 50.0)]
    assert step_seconds(hosts, WHOLE, Servers(4, 0.25, 50.0), merges=False) == pytest.approx(3 + 2 * 4)
    assert step_seconds(hosts, WHOLE, AllReduce(), merges=False) == pytest.approx(3 + 2 * 7 / 8 * 2)


def test_message_takes_its_latency_and_a_ring_that_of_all_its_steps() -> None:
    hosts = [Hosts(4, 2, 3.0, 50.0)]
    assert step_seconds(hosts, WHOLE, Servers(4, 0.25, 50.0), merges=True, latency_s=0.1) == pytest.approx(7.2)
    assert step_seconds(hosts, WHOLE, AllReduce(), merges=True, latency_s=0.1) == pytest.approx(6 + 6 * 0.1)


@pytest.mark.parametrize("exchange", [Servers(4, 0.25, 50.0), Servers(4, 0.25, 50.0, on_hosts=True), AllReduce()])
def test_overlap_hides_an_exchange_that_takes_less_time_than_backward(exchange: Servers | AllReduce) -> None:
    hosts = [Hosts(4, 2, 30.0, 50.0)]
    assert step_seconds(hosts, FINE, exchange, merges=True) == pytest.approx(30, rel=0.01)


def test_overlap_cannot_hide_more_than_the_link_carries() -> None:
    """One server takes 8 s of pushes and 8 of answers, both at once; computing takes 3, of which 2 are backward."""
    hosts = [Hosts(4, 2, 3.0, 50.0)]
    step_s = step_seconds(hosts, FINE, Servers(1, 1.0, 50.0), merges=True)
    assert 8 < step_s < 8 + 3 * FORWARD + 0.5


@pytest.mark.parametrize("exchange", [Servers(1, 1.0, 50.0, on_hosts=True), AllReduce()])
def test_one_host_exchanges_nothing_over_its_link(exchange: Servers | AllReduce) -> None:
    for stages in (WHOLE, FINE):
        assert step_seconds([Hosts(1, 8, 3.0, 1.0)], stages, exchange, merges=True, latency_s=1) in (
            pytest.approx(3.0),
            pytest.approx(5.0),  # messages to a server of the same host take their latency
        )


def test_slowest_kind_of_host_decides() -> None:
    hosts = [Hosts(4, 2, 3.0, 50.0), Hosts(1, 2, 6.0, 50.0)]
    assert step_seconds(hosts, FINE, AllReduce(), merges=True) == pytest.approx(6, rel=0.05)
    assert step_seconds(hosts, WHOLE, Servers(5, 0.2, 1e9), merges=True) == pytest.approx(6 + 2 + 2)
