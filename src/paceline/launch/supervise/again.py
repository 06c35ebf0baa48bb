"""Start a job again after a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable

from paceline.exitcodes import WORKER_LOST
from paceline.launch.supervise.supervisor import Supervisor


def run_again(make: Callable[[int], Supervisor], max_restarts: int) -> int:
    """Run a job until it ends well, is interrupted, or has failed ``max_restarts`` times more than once.

    Args:
        make: makes the supervisor of a run; gets how often the job was started again.
        max_restarts: how often it may be started again.

    Returns:
        The exit code of the last run.
    """
    for restart in range(max_restarts + 1):
        supervisor = make(restart)
        code = supervisor.run()
        if code in (0, WORKER_LOST) or supervisor.interrupted or restart == max_restarts:
            return code
        print(f"[launch] restart {restart + 1} of {max_restarts}", file=sys.stderr, flush=True)
    return 0
