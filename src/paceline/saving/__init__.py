"""Checkpoints of a training job: weights, optimizer, residuals, random numbers, and data of the script."""

from paceline.saving.job_state import Checkpoint, load, save

__all__ = ["Checkpoint", "load", "save"]
