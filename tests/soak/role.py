"""``python -m tests.soak.role server``: a role of ``python -m paceline`` that counts what it holds on SIGUSR1."""

from __future__ import annotations

import json
import os
import runpy
import signal
from pathlib import Path

from tests.soak.census import census

#: Where the counts go: a file per process id.
VARIABLE = "SOAK_FOLDER"


def _count(signum: int, frame: object) -> None:
    path = Path(os.environ[VARIABLE], f"{os.getpid()}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(census()))
    part.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _count)
    runpy.run_module("paceline", run_name="__main__", alter_sys=True)
