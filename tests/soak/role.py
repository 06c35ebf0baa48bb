"""``python -m tests.soak.role server``: a role of ``python -m paceline`` that counts what it holds on SIGUSR1."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

from paceline.net import handshake
from tests.soak.census import census, leave_out_what_is_there

#: Where the counts go: a file per process id.
VARIABLE = "SOAK_FOLDER"


def _count(signum: int, frame: object) -> None:
    path = Path(os.environ[VARIABLE], f"{os.getpid()}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(census()))
    part.replace(path)


#: What a role imports at last: an optimizer of torch imports its compiler when it is made.
_IMPORTS = {"server": ("torch._dynamo", "paceline.server.process"), "scheduler": ("paceline.scheduler.process",)}

if __name__ == "__main__":
    for name in _IMPORTS[sys.argv[1]]:
        importlib.import_module(name)
    leave_out_what_is_there()
    handshake.MAX_SEEN = 4  # else it takes thousands of connections until old ones are forgotten
    signal.signal(signal.SIGUSR1, _count)
    runpy.run_module("paceline", run_name="__main__", alter_sys=True)
