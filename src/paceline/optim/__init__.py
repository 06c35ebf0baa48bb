"""Front door for plain PyTorch loops: wrap the optimizer, keep the loop."""

from paceline.optim.distributed import DistributedOptimizer
from paceline.updaters.lamb import LAMB, LARS

__all__ = ["LAMB", "LARS", "DistributedOptimizer"]
