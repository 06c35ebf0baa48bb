"""A job under a simulated clock: the rule of the servers, with workers, links and servers that only take time."""

from paceline.sim.job import Result, SimulatedTraining, simulate
from paceline.sim.simulated_cluster import SimulatedCluster, SimulatedWorker, read_cluster

__all__ = ["Result", "SimulatedCluster", "SimulatedTraining", "SimulatedWorker", "read_cluster", "simulate"]
