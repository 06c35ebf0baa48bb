"""Children that a worker under test forks, in Python and in C, and the errors that calls raise there."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import PacelineError

ENDS_WITHIN_S = 20.0


def forked(run: Callable[[], Any]) -> int:
    """Fork a child that leaves ``run`` as it likes; returns its id."""
    pid = os.fork()
    if pid == 0:
        run()
        sys.exit(0)
    return pid


def fork_in_c(seconds: int) -> int:
    """Fork a child that sleeps, and in which no function of Python runs, as a library in C does; returns its id."""
    library = ctypes.CDLL(None)
    pid: int = library.fork()
    if pid == 0:
        library.sleep(seconds)
        library._exit(0)
    return pid


def end_of(pid: int) -> int | str:
    """Return the exit code of a child; one that does not end in time is killed."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "did not end"


def errors_in_a_child(attempts: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the errors that attempts raise in a forked child, and its exit code as ``end``."""
    reads, writes = os.pipe()

    def attempt_all() -> None:
        for name, attempt in attempts.items():
            try:
                attempt()
                text = "nothing"
            except PacelineError as error:
                text = str(error).replace("\n", " ")
            os.write(writes, f"{name}\t{text}\n".encode())

    end = end_of(forked(attempt_all))
    os.close(writes)
    with open(reads) as lines:
        found = dict(line.rstrip("\n").split("\t") for line in lines)
    return {"end": str(end), **found}
