"""Unequal machines: measured speeds, and groups, shares and the pool of samples that follow from them.

Pure: no socket, thread, clock or random generator. The caller measures times.
"""

from paceline.hetero.batch_shares import Shares, fastest_split, split_evenly, step_seconds
from paceline.hetero.choose import Choice, choose
from paceline.hetero.groups import Groups, Regrouping, group_by_speed
from paceline.hetero.measured import Measured, WorkerRound, measured_of
from paceline.hetero.revise import Revision, StepTime, free_policy
from paceline.hetero.sample_pool import Pool
from paceline.hetero.step_noise import StepNoise
from paceline.hetero.step_speed import Speed, SpeedMeter

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
