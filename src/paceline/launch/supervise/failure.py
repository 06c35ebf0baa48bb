"""How a process of a job failed."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.exitcodes import describe_code
from paceline.launch.plan import ProcessName


@dataclass(frozen=True)
class Failure:
    """What went wrong: who failed, its exit code, what happened, and how long after the start."""

    member: ProcessName
    code: int
    reason: str
    after_s: float


def describe(code: int, reason: str) -> str:
    """Say how a process ended, and what the others saw of it."""
    if code == 0:
        return reason
    return describe_code(code) if reason.startswith("its process ended: ") else f"{describe_code(code)}: {reason}"
