"""Measurements of a simulated job in lock step, as a real one makes them for ``dist_auto``."""

from __future__ import annotations

from itertools import groupby

from paceline.consistency import Policy
from paceline.hetero import Measured, WorkerRound, measured_of
from paceline.hetero.measured import ROUNDS, sizes
from paceline.sim.job import SimulatedTraining, simulate
from paceline.sim.simulated_cluster import SimulatedCluster


def measure(cluster: SimulatedCluster, batch: int = 32, rounds: int = ROUNDS, seed: int = 0) -> tuple[Measured, float]:
    """Return measurements of some rounds in lock step of a simulated cluster, and how long they take in seconds.

    Only times that a real job sees too are used: how long each worker computes and waits in each round, and the time of
    an update, of which servers know their speed.

    Args:
        cluster: the machines.
        batch: samples per round and worker.
        rounds: number of rounds to measure.
        seed: seed of the noise.

    Raises:
        MissingExtraError: simpy is not installed.
    """
    steps: list[list[WorkerRound]] = [[] for _ in cluster.workers]
    seconds = 0.0
    for number, (size, some) in enumerate(groupby(sizes(batch, rounds))):
        plan = SimulatedTraining(
            Policy("all"), batch=size, rounds=len(list(some)), seed=2 * seed + number, keep_steps=True
        )
        result = simulate(cluster, plan)
        seconds += result.seconds
        for kept, more in zip(steps, result.steps, strict=True):
            kept.extend(more)
    return measured_of(steps, batch, cluster.update_s / cluster.servers), seconds
