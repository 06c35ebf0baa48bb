"""Keeps this machine as busy as a test wants it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

#: A process that only uses up time. It ends with whoever started it, however that ends.
_SPIN = [sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"]

_LOOK_S = 1.0


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that only use up time.

    Each is in a session of its own: Linux's autogroups give a session, not a process, its share of the processors, so
    forty processes of one session would take no more from a job than a single one.
    """
    processes = [subprocess.Popen(_SPIN, start_new_session=True) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def running() -> int:
    """Return how many threads of this machine run or wait for a processor now."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])


class Load:
    """Keeps a number of threads running: what is tested counts, and processes that only use up time fill the rest.

    Args:
        target: threads that run or wait for a processor.

    Attributes:
        mean: of the threads that ran, as seen every second.
    """

    def __init__(self, target: int) -> None:
        self.target, self.mean = target, 0.0
        self._done = threading.Event()

    def __enter__(self) -> Load:
        self._stack = contextlib.ExitStack()
        self._spinners = self._stack.enter_context(busy(self.target))
        self._active = self.target
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._stack.close()

    def _run(self) -> None:
        looks = 0
        while not self._done.wait(_LOOK_S):
            found = running() - 1  # this thread runs, too
            looks += 1
            self.mean += (found - self.mean) / looks
            self._keep(min(self.target, max(0, self._active + self.target - found)))

    def _keep(self, count: int) -> None:
        for process in self._spinners[self._active : count]:
            process.send_signal(signal.SIGCONT)
        for process in self._spinners[count : self._active]:
            process.send_signal(signal.SIGSTOP)
        self._active = count
