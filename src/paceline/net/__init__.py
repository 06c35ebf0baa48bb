"""Talks between processes: secure connections, requests and answers, the lifeline, shared memory."""

from paceline.net.security import Security, new_job_key

__all__ = ["Security", "new_job_key"]
