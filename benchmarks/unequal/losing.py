"""Machines on which groups lose, in the simulator, each mode at its own rate."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from benchmarks.unequal.columns import TUNING_SEEDS, Setup
from benchmarks.unequal.modes import CLASSES, Machines
from benchmarks.unequal.simulated import MODEL_BYTES, Service, cluster, run, score, tuned
from benchmarks.unequal.trial import Trial
from paceline.sim import SimulatedCluster, SimulatedWorker

MODES = ("BSP", "LB-BSP", "ASP", "SSP 3", "GSP 1/Y", "GSP 1/Y +shares", "K-sync")
#: Part of the server's link that dist_async would need.
LOAD = 1.4

Regimes = dict[str, dict[str, float]]


def regimes(machines: Machines, service: Service) -> dict[str, SimulatedCluster]:
    """Return the machines of each regime."""
    usual = cluster(machines, service)
    pushes_per_s = sum(machines.per_class / seconds for seconds in CLASSES)
    alike = replace(usual, workers=(SimulatedWorker(machines.speeds[machines.per_class]),) * machines.count)
    return {
        "1 : 2 : 4": usual,
        "alike": alike,
        "alike, 5 % of batches take 8 times as long": replace(alike, spike_probability=0.05, spike_factor=8.0),
        "1 : 2 : 4, server's link too slow": replace(usual, bandwidth=pushes_per_s * MODEL_BYTES / LOAD),
        "wrong groups": replace(usual, workers=_shuffled(machines)),
    }


def _shuffled(machines: Machines) -> tuple[SimulatedWorker, ...]:
    """Deal the classes out over the groups: each has workers of several classes."""
    speeds = machines.speeds[:: machines.per_class]
    return tuple(SimulatedWorker(speeds[rank % len(speeds)]) for rank in range(machines.count))


def sooner(setup: Setup, service: Service) -> Regimes:
    """Return how many times as soon as lock step each mode reaches the target, by regime and mode."""
    machines = Machines(setup.per_class)
    cells = [(on, mode) for on in regimes(machines, service).values() for mode in MODES]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = iter(pool.map(_seconds, cells, [setup] * len(cells), [service] * len(cells)))
        times = {name: {mode: next(found) for mode in MODES} for name in regimes(machines, service)}
    return {name: {mode: row["BSP"] / time for mode, time in row.items()} for name, row in times.items()}


def _seconds(cell: tuple[SimulatedCluster, str], setup: Setup, service: Service) -> float:
    on, mode = cell
    seeds = TUNING_SEEDS[: len(setup.seeds)]
    rate = tuned(mode, seeds, setup.simulated_s, service, on)
    trials = [Trial(mode, rate, seed, setup.simulated_s, per_class=setup.per_class) for seed in setup.seeds]
    return score([run(one, service, on) for one in trials])
