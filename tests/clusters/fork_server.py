"""Forks processes that have torch and paceline imported already; each starts two seconds earlier for it.

A child leads its own session, has its own environment, arguments and open files, and runs ``python -m MODULE`` like a
program that was started as such. But all children have the same hash seed, and they exit without tearing modules down.
Where the environment holds what an interpreter or a library reads when it starts, :meth:`ForkServer.can_run` says no.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.supervise.guardian import Guardian
from paceline.testing import LocalJob
from paceline.testing.channel import readable
from paceline.testing.job import common_environment
from paceline.testing.process import start_program

#: Prefixes of variables that an interpreter or a library reads when it starts.
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "NUMBA_",
    "TORCH_",
    "CUDA_",
)

_ROOT = Path(__file__).parents[2]

#: A task, with the whole environment.
MAX_MESSAGE_BYTES = 1 << 20

_START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 10.0


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter or a library reads when it starts."""
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


class ForkedProcess:
    """A forked process, with the part of ``subprocess.Popen`` that is used."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server, self.pid = fork_server, pid
        self._pidfd: int | None = None  # it may have ended already
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended it), None while it runs."""
        return self._ended(self._fork_server.code(self.pid))

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        code = self._fork_server.wait(self.pid, timeout)
        self._ended(code)
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def _ended(self, code: int | None) -> int | None:
        """Release a process that has ended."""
        if code is not None and self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        return code


class ForkServer:
    """The client of a process that forks children on request. That process ends with this one.

    Args:
        env: its environment; children may differ from it in variables that are not read at the start.
        modules: what it imports beside the usual modules.
        is_usual: it imports the usual modules, which takes some seconds; its children need them.
    """

    def __init__(self, env: Mapping[str, str], modules: Sequence[str] = (), is_usual: bool = True) -> None:
        self._start = read_at_start(env)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._late = 0
        """Children that nobody waits for any more, whose ids are still to come."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        with theirs:
            arguments = [str(theirs.fileno()), str(int(is_usual)), *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.clusters.fork_server_main", *arguments],
                cwd=_ROOT, env=dict(env), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        atexit.register(self.close)

    def can_run(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a command can be forked: ``python -m``, with the same variables that are read at the start."""
        mine = self._process.poll() is None and self._owner == os.getpid()
        return mine and list(argv[:2]) == [sys.executable, "-m"] and read_at_start(env) == self._start

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], output: int, register: int, pass_fds: Sequence[int]
    ) -> ForkedProcess:
        """Run ``python -m MODULE ARGUMENTS`` in a new child.

        Args:
            argv: the command.
            env: its whole environment.
            output: file descriptor for its stdout and stderr.
            register: file descriptor to which the child writes its process id first.
            pass_fds: file descriptors that it inherits, under the same numbers.

        Raises:
            RuntimeError: the forking process has ended, or a busy host forked no child in time.
        """
        task = {"argv": list(argv[2:]), "env": dict(env), "fds": list(pass_fds), "directory": os.getcwd()}
        fds = array.array("i", [output, register, *pass_fds])
        with self._lock:
            self._socket.sendmsg([json.dumps(task).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            deadline = time.monotonic() + _START_TIMEOUT_S
            while (pid := self._hear(max(0.0, deadline - time.monotonic()))) is None:
                if time.monotonic() > deadline:
                    self._late += 1
                    raise RuntimeError(f"no child was forked within {_START_TIMEOUT_S:g} s")
            return ForkedProcess(self, pid)

    def _hear(self, timeout_s: float) -> int | None:
        """Receive one message; returns the id of a new child if the message is about one."""
        if not readable([self._socket.fileno()], timeout_s):
            return None
        data = self._socket.recv(4096)
        if not data:
            raise RuntimeError(f"the forking process has ended with {self._process.wait(10.0)}")
        said = json.loads(data)
        if "code" in said:
            self._codes[said["pid"]] = said["code"]
            return None
        pid: int = said["pid"]
        self._codes.pop(pid, None)  # of an earlier process with this id
        if self._late:  # ids come in the order of the requests
            self._late -= 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return None
        return pid

    def code(self, pid: int) -> int | None:
        """Return a child's exit code, None while it runs."""
        with self._lock:
            while pid not in self._codes and readable([self._socket.fileno()], 0.0):
                self._hear(0.0)
            return self._codes.get(pid)

    def wait(self, pid: int, timeout_s: float) -> int:
        """Wait for a child's end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = time.monotonic() + timeout_s
        while (code := self.code(pid)) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise subprocess.TimeoutExpired(f"child {pid}", timeout_s)
            # Another thread may receive the message: look again soon.
            readable([self._socket.fileno()], min(remaining, 0.1))
        return code

    def close(self) -> None:
        """End the forking process; its children go on."""
        if self._owner == os.getpid():
            self._socket.close()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # a busy host: it may still import
                self._process.kill()
                self._process.wait()


@functools.cache
def _server_of(owner: int, start: tuple[tuple[str, str], ...]) -> ForkServer:
    """Return the fork server of a process, made when it starts its first job.

    Some libraries set variables when they are imported, such as scikit-learn; then jobs get another server.
    """
    return ForkServer(common_environment())


def fork_or_start(
    argv: Sequence[str], env: Mapping[str, str], output: int, guardian: Guardian, pass_fds: Sequence[int]
) -> Any:
    """Fork a process if possible, else start it as a program; see :data:`paceline.testing.process.Start`."""
    server = _server_of(os.getpid(), tuple(sorted(read_at_start(common_environment()).items())))
    if server.can_run(argv, env):
        return server.fork(argv, env, output, guardian.fd, pass_fds)
    return start_program(argv, env, output, guardian, pass_fds)


def fork_jobs() -> None:
    """Make all jobs of this process fork their processes."""
    LocalJob.start_process = staticmethod(fork_or_start)
