"""A job of a batch engine, followed from the user's shell. Slurm and Grid Engine give their words.

| state of the job | event | next |
|---|---|---|
| runs | the engine does not answer for a while | runs; the engine is asked again for ``SILENCE_S`` |
| runs | a signal for the workers | runs; the signal goes the engine's way |
| runs | the engine does not know it any more | ended: its exit code counts |
| runs | ``wait`` is interrupted, or ``cancel`` | cancelled; ended when the engine says so |
| runs | this process is killed | a process that is left cancels it |
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TextIO

from paceline.errors import LaunchError
from paceline.launch.backends import Job
from paceline.launch.engines.programs import FileTail, Patience, run_program
from paceline.launch.processes import wait_for
from paceline.launch.supervise.child import FOR_WORKERS
from paceline.launch.supervise.guardian import Canceller

#: How long an engine may not answer while a job runs.
SILENCE_S = 600.0


class BatchJob(Job):
    """Shows the output of a job until it ends.

    Args:
        job_id: the engine's name of the job.
        outputs: files of the job's output, and where they are shown.
        package: what to install where a program of the engine is missing.

    Attributes:
        name: the engine's name.
        cancels: the program that cancels a job.
        by_hand: the command that helps where the job does not end.
        poll_s: time between two questions.
        cancel_s: how long the job may take to end after it was cancelled. As installed, Slurm's ``KillWait`` is 30 s,
            and the ``notify`` of a queue of Grid Engine 60 s.
    """

    name: ClassVar[str]
    cancels: ClassVar[str]
    by_hand: ClassVar[str]
    poll_s = 0.5
    cancel_s = 90.0

    def __init__(self, job_id: str, outputs: Sequence[tuple[Path, TextIO]], package: str) -> None:
        self.id, self._package = job_id, package
        self._outputs = [FileTail(path, out) for path, out in outputs]
        self._shown: list[FileTail] = []
        self._ended = False
        self._canceller = Canceller([self.cancels, job_id])

    @abstractmethod
    def runs(self) -> bool:
        """Ask the engine whether the job has not ended yet.

        Raises:
            LaunchError: the engine does not answer.
        """

    @abstractmethod
    def code(self) -> int:
        """Return the exit code of a job that has ended."""

    def wait(self) -> int:
        """Show the job's output until it ends; return its exit code."""
        patience, self._shown = Patience(SILENCE_S), self._outputs
        try:
            with _noted(*FOR_WORKERS) as came:
                while patience.ask(self.runs, True):
                    self._show()
                    while came:
                        self.pass_on(came.pop(0))
                    time.sleep(self.poll_s)
            self._ended = True
            self._show(is_over=True)
            return self.code()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the job unless it has ended, wait for its end, and show the rest of the output that was shown."""
        if not self._ended:
            with contextlib.suppress(LaunchError):  # it ended meanwhile
                run_program([self.cancels, self.id], self._package)
            if not wait_for(lambda: not self.runs(), self.cancel_s, self.poll_s):
                raise LaunchError(
                    f"{self.name} job {self.id} has not ended {self.cancel_s:g} s after {self.cancels}: "
                    f"{self.by_hand} {self.id}"
                )
            self._ended = True
        self._show(is_over=True)
        self._canceller.release()

    def pass_on(self, signum: int) -> None:
        """Send a signal to the workers that handle it. By default the engine has no way for it."""
        self.say(f"{signal.Signals(signum).name} does not reach the workers: {self.name} has no way for it")

    def say(self, text: str) -> None:
        """Show a line of the launcher."""
        print(f"[launch] {text}", file=sys.stderr, flush=True)

    def _show(self, *, is_over: bool = False) -> None:
        for tail in self._shown:
            tail.show(is_over=is_over)


@contextlib.contextmanager
def _noted(*signums: int) -> Iterator[list[int]]:
    """Yield a list of those signals that come in the block, unless they are handled or ignored."""
    came: list[int] = []
    free = [one for one in signums if signal.getsignal(one) is signal.SIG_DFL]
    for signum in free:
        signal.signal(signum, lambda signum, frame: came.append(signum))
    try:
        yield came
    finally:
        for signum in free:
            signal.signal(signum, signal.SIG_DFL)
