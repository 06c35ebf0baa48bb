"""Start one process of a job, in a session of its own that cannot outlive the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from paceline import forks
from paceline.errors import LaunchError
from paceline.launch.supervise import signals

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Child:
    """A process, and the pipes on which it prints; with ``feeds_stdin`` also the one from which it reads.

    Its exit is observed without reaping it: as long as the launcher lives, the zombie keeps the id of the session
    from being given to an unrelated process that a later signal would hit.

    Raises:
        LaunchError: the command cannot be run; the message has the system's reason.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        register: Callable[[], None],
        pass_fds: Sequence[int] = (),
        feeds_stdin: bool = False,
    ) -> None:
        launcher = os.getpid()
        with signals.held() as mask, forks.passing_on():

            def prepare() -> None:
                register()
                _die_with(launcher)
                signals.restore_in_child(mask)

            self._process = _popen(argv, env, prepare, pass_fds, subprocess.PIPE if feeds_stdin else subprocess.DEVNULL)
        self.code: int | None = None
        """The exit code, 128 + n after signal n; None while it runs."""

    @property
    def pid(self) -> int:
        """The process id, which is the id of its session and first process group as well."""
        return self._process.pid

    def pipes(self) -> tuple[int, int]:
        """Return the descriptors from which its stdout and stderr are read, non-blocking."""
        streams = self._process.stdout, self._process.stderr
        fds = [stream.fileno() for stream in streams if stream is not None]
        for fd in fds:
            os.set_blocking(fd, False)
        return fds[0], fds[1]

    def stdin(self) -> int:
        """Return the descriptor from which the process reads, non-blocking.

        Raises:
            ValueError: it reads nothing, or :meth:`close_stdin` was called.
        """
        if self._process.stdin is None or self._process.stdin.closed:
            raise ValueError("the process has no stdin")
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process.stdin.fileno()

    def close_stdin(self) -> None:
        """End the process's input. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def ended(self) -> bool:
        """Tell whether the process has ended, and note its exit code."""
        if self.code is None:
            self.code = _code_of(self._process)
        return self.code is not None

    def release(self) -> None:
        """Close the pipes and reap the process if it has ended."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.poll()


def _code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process; None: it runs. Where the system can tell without, its id stays in use."""
    if hasattr(os, "waitid"):
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return int(status.si_status) + (0 if status.si_code == os.CLD_EXITED else 128)
    code = process.poll()
    return code if code is None or code >= 0 else 128 - code


def _popen(
    argv: Sequence[str], env: Mapping[str, str], prepare: Callable[[], None], pass_fds: Sequence[int], stdin: int
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            env=env,
            bufsize=0,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=prepare,  # noqa: PLW1509 - the launcher has one thread
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LaunchError(f"{argv[0]!r} cannot be run: {reason}") from error


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent. Called between fork and exec."""
    if hasattr(_LIBC, "prctl"):  # of Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _die_with(launcher: int) -> None:
    """Ask the kernel to kill this process when the launcher dies; the guardian kills its descendants."""
    die_with_parent()
    if os.getppid() != launcher:
        os._exit(1)  # it died before the kernel was asked
