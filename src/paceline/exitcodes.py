"""Exit codes of the role processes."""

from __future__ import annotations

PEER_FAILED = 76
"""This process ended because another one of the job did; the launcher looks for that one."""
