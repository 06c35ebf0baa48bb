"""Unequal machines: measured speeds, and what follows from them for groups, shares and the pool of samples.

Pure: no socket, thread, clock or random generator. Times are measured by who calls.
"""

from paceline.hetero.groups import Groups, group_by_speed
from paceline.hetero.pool import Pool
from paceline.hetero.regroup import Regrouping
from paceline.hetero.shares import Shares, fastest_split, split_evenly, step_seconds
from paceline.hetero.speed import Speed, SpeedMeter

__all__ = [
    "Groups",
    "Pool",
    "Regrouping",
    "Shares",
    "Speed",
    "SpeedMeter",
    "fastest_split",
    "group_by_speed",
    "split_evenly",
    "step_seconds",
]
