"""``paceline jobs``."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.cli.options import Parser
from paceline.launch import runtime
from paceline.observe.table import table


def run(name: str, words: Sequence[str]) -> int:
    """Print the jobs of this user and return 0.

    Raises:
        UsageError: there are words; it has none.
        LaunchError: the folder of the jobs cannot be used.
    """
    Parser(name, (), "paceline jobs", "List your jobs whose launcher runs on this machine.").parse(words)
    rows = [
        (
            record.id,
            str(record.pid),
            time.strftime("%H:%M:%S", time.localtime(record.started)),
            f"{record.workers}+{record.servers}",
            ",".join(record.hosts),
            record.command,
        )
        for record in runtime.jobs()
    ]
    print(table(("job", "pid", "started", "n+s", "hosts", "command"), rows) if rows else "no job of yours runs here")
    return 0
