"""The process between a launcher and an engine: remote shells reach the engine's processes through its socket."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.host_list import Host

#: In the text of a plan, for the socket of the broker, which is made when the job starts.
SOCKET = "<socket of the job>"

_LEAVE_S = 10.0


def shell_command(python: str, request: str) -> list[str]:
    """Return the command of a remote shell that sends a request to the broker of a job."""
    return [python, "-m", "paceline.launch.remote.shell", SOCKET, request]


class Broker:
    """A child process with a folder for its socket. It ends, with all that it holds, when its stdin is closed.

    Args:
        name: name for messages and the folder: ``hub``.
        module: module that it runs.
    """

    def __init__(self, name: str, module: str) -> None:
        self._name, self._module = name, module
        self._folder = Path(tempfile.mkdtemp(prefix=f"paceline-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self.socket = str(self._folder / "socket")

    def start(self, line: str, environ: Mapping[str, str] | None = None) -> None:
        """Start the process.

        Args:
            line: its task, for its stdin.
            environ: variables besides the launcher's own.
        """
        with open(self._folder / "errors", "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def says(self, timeout_s: float) -> str:
        """Return the next line of its stdout; nothing if none comes in time.

        Raises:
            LaunchError: it has ended; with its stderr.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard and selector.select(max(0.0, until - time.monotonic())):
                more = os.read(self._process.stdout.fileno(), 4096)
                if not more:
                    text = (self._folder / "errors").read_text(errors="replace").strip()
                    raise LaunchError(text or f"the {self._name} has ended")
                self._heard += more
        line, newline, rest = self._heard.partition(b"\n")
        if not newline:
            return ""
        self._heard = rest
        return line.decode().strip()

    def located(self, command: Callable[[Host], Sequence[str]]) -> Callable[[Host], list[str]]:
        """Return commands of remote shells with the socket in the place of :data:`SOCKET`."""
        return lambda host: [self.socket if word == SOCKET else word for word in command(host)]

    def close(self) -> None:
        """End the process and remove its folder. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
