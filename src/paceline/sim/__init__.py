"""A job under a simulated clock: the rule of the servers, with workers, links and servers that only take time."""

from paceline.sim.cluster import Cluster, Machine, read_cluster
from paceline.sim.job import Plan, Result, simulate

__all__ = ["Cluster", "Machine", "Plan", "Result", "read_cluster", "simulate"]
