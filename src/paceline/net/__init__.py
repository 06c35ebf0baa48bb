"""Talks between processes: secure connections, requests and answers, the lifeline, shared memory."""

from paceline.net.base import Hub, Listener
from paceline.net.security import Security, new_job_key

__all__ = ["Hub", "Listener", "Security", "new_job_key"]
