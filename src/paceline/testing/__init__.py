"""Real jobs on this machine, for tests: a scheduler, servers and workers as processes that never outlive the test."""

from paceline.testing.channel import listen, tell
from paceline.testing.job import LocalJob
from paceline.testing.process import Process, Worker, WorkerFailedError

__all__ = ["LocalJob", "Process", "Worker", "WorkerFailedError", "listen", "tell"]
