"""Waiting for file descriptors to become readable, whatever their numbers (``select`` takes those below 1024)."""

from __future__ import annotations

import select


def readable(fds: list[int], timeout_s: float | None = None) -> set[int]:
    """Return which file descriptors can be read (or are at their end); waits until one can, or for the time given."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)}
