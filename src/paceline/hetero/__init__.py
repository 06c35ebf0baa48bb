"""Unequal machines: measured speeds, and what follows from them for groups, shares and the pool of samples.

Pure: no socket, thread, clock or random generator. Times are measured by who calls.
"""

from paceline.hetero.choose import Choice, choose
from paceline.hetero.groups import Groups, Regrouping, group_by_speed
from paceline.hetero.measured import Measured, WorkerRound, measured_of
from paceline.hetero.noise import StepNoise
from paceline.hetero.pool import Pool
from paceline.hetero.revise import Revision, StepTime, free_policy
from paceline.hetero.shares import Shares, fastest_split, split_evenly, step_seconds
from paceline.hetero.speed import Speed, SpeedMeter

__all__ = [
    "Choice",
    "Groups",
    "Measured",
    "Pool",
    "Regrouping",
    "Revision",
    "Shares",
    "Speed",
    "SpeedMeter",
    "StepNoise",
    "StepTime",
    "WorkerRound",
    "choose",
    "fastest_split",
    "free_policy",
    "group_by_speed",
    "measured_of",
    "split_evenly",
    "step_seconds",
]
