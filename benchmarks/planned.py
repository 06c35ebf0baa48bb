"""Measured steps against those of ``paceline plan``: hosts are network namespaces, so this needs root.

    python -m benchmarks.planned --rate 100mbit --workers 2 3 --layout "one server" co-located

The layers are equal, and their computation only waits, so two cores are enough for a few hosts. Workers train with
``DistributedOptimizer``, the loop that a plan with overlap describes. The plan gets the rate that plain TCP streams
carry in both directions at once, before or after the job, whichever is more. *Measured* is the median of the steps;
their mean is beside it, because long and short steps alternate where many workers share a server. TCP is Cubic: BBR,
the default of some machines, stalls for seconds where queues are short.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.network import payload_of, rate_of, run_workers
from paceline.hetero import Speed
from paceline.sim import SimulatedCluster, SimulatedWorker
from paceline.sim.models import even
from paceline.sim.scaling import ExchangePlan, Planner, Training
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts

#: Servers on hosts of their own, by the number of workers.
LAYOUTS = {"one server": lambda workers: [1], "1:1": lambda workers: [1] * workers, "co-located": lambda workers: []}


@dataclass(frozen=True)
class Work:
    """Model and loop."""

    layers: int
    numel: int
    """Elements of a layer."""
    compute_s: float
    steps: int


@dataclass(frozen=True)
class Result:
    layout: str
    workers: int
    payload_mb_s: float
    planned_ms: float
    measured_ms: float
    steps_ms: list[float]

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.planned_ms

    @property
    def mean_ratio(self) -> float:
        return statistics.fmean(self.steps_ms) / self.planned_ms


def planned_s(layout: str, workers: int, work: Work, bandwidth: float) -> float:
    """Return the step time of a plan."""
    one = SimulatedWorker(Speed(0.0, work.compute_s), bandwidth)
    cluster = SimulatedCluster((one,) * workers, bandwidth=bandwidth, latency_s=5e-5)
    planner = Planner(Training(tuple(even(work.layers * work.numel, work.layers)), cluster, batch=1))
    return planner.estimate(ExchangePlan(layout, overlap=True, merge=True), workers).step_s


def measured_s(hosts: Hosts, layout: str, workers: int, work: Work) -> list[float]:
    """Run a job; returns the times of its steps."""
    alone = LAYOUTS[layout](workers)
    servers = [0] * workers + alone if alone else [1] * workers
    words = [str(one) for one in (work.layers, work.numel, work.compute_s, work.steps)]
    with HostsJob(hosts, [1] * workers + [0] * len(alone), servers, check_rules=False) as job:
        found: list[float] = run_workers(job, workers, "layers_worker", words)["seconds"]
    return found


def measure(layout: str, workers: int, work: Work, rate_bits_s: float | None) -> Result:
    """Measure a layout on hosts of its own, and plan it."""
    with Hosts(workers + len(LAYOUTS[layout](workers)), rate_bits_s=rate_bits_s) as hosts:
        for one in hosts:
            one.run(f"ip route change 10.77.0.0/24 dev eth0 src {one.address} congctl cubic")
        before = payload_of(hosts).both_ways
        seconds = measured_s(hosts, layout, workers, work)
        payload = 1e6 * max(before, payload_of(hosts).both_ways)
    planned_ms = 1e3 * planned_s(layout, workers, work, payload)
    steps_ms = [1e3 * one for one in seconds]
    return Result(layout, workers, payload / 1e6, planned_ms, statistics.median(steps_ms), steps_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of every cable, in each direction")
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--numel", type=int, default=2**18, help="elements of a layer")
    parser.add_argument("--compute-s", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if why_no_hosts():
        raise SystemExit(f"this benchmark makes network namespaces: {why_no_hosts()}")
    work = Work(args.layers, args.numel, args.compute_s, args.steps)
    results = [measure(layout, workers, work, rate_of(args.rate)) for workers in args.workers for layout in args.layout]
    table = Table(title=f"{work}, {args.rate}")
    for heading in (
        "layout", "workers", "payload MB/s", "planned, ms", "measured, ms", "measured / planned", "mean / planned",
    ):  # fmt: skip
        table.add_column(heading)
    for one in results:
        rows = f"{one.payload_mb_s:.2f}", f"{one.planned_ms:.0f}", f"{one.measured_ms:.0f}"
        table.add_row(one.layout, str(one.workers), *rows, f"{one.ratio:.2f}", f"{one.mean_ratio:.2f}")
    Console(width=110).print(table)
    print(json.dumps({"work": vars(args), "results": [asdict(one) for one in results]}))


if __name__ == "__main__":
    main()
