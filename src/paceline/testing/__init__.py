"""Real jobs on this machine, for tests: a scheduler, servers and workers as processes that never outlive the test."""

from paceline.consistency import CheckedRule, check_every_rule
from paceline.testing.channel import listen, tell
from paceline.testing.codec import check_codec
from paceline.testing.faults import Faults
from paceline.testing.job import LocalJob
from paceline.testing.process import Process, Worker, WorkerFailedError

__all__ = [
    "CheckedRule",
    "Faults",
    "LocalJob",
    "Process",
    "Worker",
    "WorkerFailedError",
    "check_codec",
    "check_every_rule",
    "listen",
    "tell",
]
