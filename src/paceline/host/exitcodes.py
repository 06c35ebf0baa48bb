"""Exit codes of the role processes."""

from __future__ import annotations

import signal

PEER_FAILED = 76
"""This process ended because another one of the job did; the launcher looks for that one."""

WORKER_LOST = 77
"""The job has ended well, but lost a worker on its way; the others went on without it."""


def describe_code(code: int) -> str:
    """Return how a process ended, in words; ``code`` is 128 + n after signal n."""
    if code <= 128:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
    except ValueError:
        return f"exit code {code}"


def why_ended(code: int) -> str:
    """Return the reason of a death that nothing but an exit code tells."""
    if code == PEER_FAILED:
        return f"its process ended because it had lost another one ({describe_code(code)})"
    return f"its process ended: {describe_code(code)}"
