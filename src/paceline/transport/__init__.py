"""Moves frames between processes: sockets, shared memory, and queues in memory for tests."""

from paceline.transport.base import Hub, Listener
from paceline.transport.security import Security, new_job_key

__all__ = ["Hub", "Listener", "Security", "new_job_key"]
