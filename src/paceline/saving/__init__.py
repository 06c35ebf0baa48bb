"""Checkpoints of a training job: weights, optimizer, residuals, random numbers and what the script adds, as one."""

from paceline.saving.job import Checkpoint, load, save

__all__ = ["Checkpoint", "load", "save"]
