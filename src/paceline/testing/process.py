"""One process of a job under test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from paceline.host import forks
from paceline.launch.supervise.guardian import Guardian
from paceline.testing.channel import READ_VARIABLE, WRITE_VARIABLE, JsonLines, say

#: Starts a process that leads its own session and ends with this one: a command with its whole environment, the file
#: descriptor for its stdout and stderr, the guardian, and file descriptors that it inherits.
Start: TypeAlias = Callable[[Sequence[str], Mapping[str, str], int, Guardian, Sequence[int]], "subprocess.Popen[bytes]"]


def start_program(
    argv: Sequence[str], env: Mapping[str, str], output: int, guardian: Guardian, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a program; see :data:`Start`."""
    with forks.passing_on():
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=guardian.register,  # noqa: PLW1509 - it only writes to a pipe
            pass_fds=pass_fds,
        )


class WorkerFailedError(AssertionError):
    """A worker function raised, or its process was killed. The text ends with its stderr."""


class Process:
    """A process that leads its own session.

    The file that takes its output has its name. The guardian ends it if this process is killed.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        directory: Path,
        guardian: Guardian,
        pass_fds: Sequence[int] = (),
        start: Start = start_program,
    ) -> None:
        self.name = name
        self._output = directory / f"{name.replace(' ', '-')}.txt"
        with open(self._output, "wb") as output:
            self._handle = start(argv, env, output.fileno(), guardian, pass_fds)
        self.pid = self._handle.pid

    @property
    def code(self) -> int | None:
        """Exit code (negative: the signal that ended it), None while it runs."""
        return self._handle.poll()

    @property
    def output(self) -> str:
        """Its output to stdout and stderr so far."""
        return self._output.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return its exit code.

        Raises:
            TimeoutError: it still runs.
        """
        try:
            return self._handle.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {timeout_s:g} s; it wrote:\n{self.output}") from None

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        if self.code is None:
            self._handle.send_signal(signum)

    def rss_bytes(self) -> int:
        """Return its resident memory."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def close(self) -> None:
        """Kill it if it still runs, and release it."""
        self.kill()
        self._handle.wait(10.0)


class Worker(Process):
    """A process that runs a worker function, whose result will be in a file."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        directory: Path,
        guardian: Guardian,
        result: Path,
        start: Start,
    ) -> None:
        self._result = result
        self._from_worker, theirs_out = os.pipe()
        theirs_in, self._to_worker = os.pipe()
        ends = {READ_VARIABLE: str(theirs_in), WRITE_VARIABLE: str(theirs_out)}
        try:
            super().__init__(name, argv, {**env, **ends}, directory, guardian, (theirs_in, theirs_out), start)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._lines = JsonLines(self._from_worker)

    def heard(self, timeout_s: float = 60.0) -> Any:
        """Return the next value that the worker function sends with :func:`paceline.testing.tell`.

        Raises:
            TimeoutError: it sent nothing in time.
            WorkerFailedError: it ended.
        """
        try:
            return self._lines.next(timeout_s)
        except EOFError:
            raise WorkerFailedError(f"{self.name} ended (exit code {self.wait(10.0)}):\n{self.output}") from None
        except TimeoutError as error:
            raise TimeoutError(f"{self.name}: {error}; it wrote:\n{self.output}") from None

    def tell(self, value: Any) -> None:
        """Send a value to the worker function, which reads it with :func:`paceline.testing.listen`."""
        say(self._to_worker, value)

    def result(self, timeout_s: float = 60.0) -> Any:
        """Wait for the worker's end and return what its function returned.

        Raises:
            TimeoutError: it still runs.
            WorkerFailedError: it failed.
        """
        code = self.wait(timeout_s)
        if code != 0 or not self._result.exists():
            raise WorkerFailedError(f"{self.name} failed (exit code {code}):\n{self.output}")
        return json.loads(self._result.read_text())

    def close(self) -> None:
        """Kill it if it still runs, and release it and its pipes."""
        super().close()
        os.close(self._from_worker)
        os.close(self._to_worker)
