"""Bytes that this process has exchanged over the network, for its status."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_sent = _received = 0


def note_sent(size: int) -> None:
    """Count a message that was sent."""
    global _sent
    with _lock:
        _sent += size


def note_received(size: int) -> None:
    """Count a message that has arrived."""
    global _received
    with _lock:
        _received += size


def total() -> tuple[int, int]:
    """Return the bytes sent and received so far."""
    return _sent, _received
