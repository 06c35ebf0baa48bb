"""A job under a simulated clock: the rule of the servers, with workers, links and servers that only take time."""

from paceline.sim.simulated_cluster import SimulatedCluster, SimulatedWorker, read_cluster
from paceline.sim.simulation import Result, SimulatedTraining, simulate

__all__ = ["Result", "SimulatedCluster", "SimulatedTraining", "SimulatedWorker", "read_cluster", "simulate"]
