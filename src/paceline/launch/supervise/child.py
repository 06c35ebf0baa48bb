"""Start one process of a job, in a session that cannot outlive the launcher; and signals as bytes in a pipe."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from paceline.errors import LaunchError
from paceline.host import descriptors, forks

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Child:
    """A process, and the pipes on which it prints; with ``feeds_stdin`` also the one from which it reads.

    It ignores the signals ``ignored``.

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
        ignored: Sequence[int] = (),
    ) -> None:
        launcher = os.getpid()
        with _held() as mask, forks.passing_on():

            def prepare() -> None:
                register()
                _die_with(launcher)
                _restore_in_child(mask, ignored)

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
        """Return the descriptor from which the process reads, non-blocking."""
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
        raise LaunchError(f"{argv[0]!r} cannot be run: {why_none(error)}") from error


def why_none(error: OSError | ValueError) -> str:
    """Return why a process could not be started."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"{text}; raise the limit of {descriptors.limit()} (ulimit -Hn)"
    if not isinstance(error, OSError) or error.errno != errno.EAGAIN:
        return text
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    number = "unlimited" if limit == resource.RLIM_INFINITY else limit
    return (
        f"there are as many processes and threads as may be: raise the user's limit (ulimit -u, which is {number}) or "
        "that of the container or service (pids.max)"
    )


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent. Called between fork and exec."""
    if hasattr(_LIBC, "prctl"):  # of Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _die_with(launcher: int) -> None:
    """Ask the kernel to kill this process when the launcher dies; the guardian kills its descendants."""
    die_with_parent()
    if os.getppid() != launcher:
        os._exit(1)  # it died before the kernel was asked


#: Signals that end a job. One that is ignored when the launcher starts (``nohup``, ``&``) stays ignored.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: Signals that are for scripts. The other processes live on when an engine signals all, as ``scancel --signal`` does.
FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2)

#: Signals that are for the processes of a job. One that is handled or ignored when the launcher starts stays so.
PASSED_ON = (*FOR_WORKERS, signal.SIGTSTP, signal.SIGCONT)


class SignalPipe:
    """Catches SIGCHLD, and the signals that end a job or are for its processes (main thread only).

    It does so for as long as the ``with`` block runs.
    """

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        caught = [signum for signum in ENDING if signal.getsignal(signum) is not signal.SIG_IGN]
        caught += [signum for signum in PASSED_ON if signal.getsignal(signum) is signal.SIG_DFL]
        self._caught = frozenset(caught)
        self._before = {signum: signal.signal(signum, _noted) for signum in (signal.SIGCHLD, *caught)}
        forks.in_children(self, SignalPipe._restore)
        return self

    def _restore(self) -> None:
        """Handle signals as before: in a child they must not end the launcher's job."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
        signal.set_wakeup_fd(-1)

    def __exit__(self, *_: object) -> None:
        self._restore()
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[int]:
        """Return the signals that came since the last call, but SIGCHLD, in order, repeated ones included."""
        try:
            return [signum for signum in os.read(self.fd, 4096) if signum in self._caught]  # a script may handle more
        except BlockingIOError:
            return []


def _noted(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the number into the pipe."""


@contextmanager
def _held() -> Iterator[set[signal.Signals]]:
    """Block the signals that are caught while a child is made; yields the mask that the child must restore."""
    caught = (*ENDING, *PASSED_ON)
    before = {signal.Signals(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, caught)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _restore_in_child(mask: set[signal.Signals], ignored: Sequence[int]) -> None:
    """Undo the launcher's changes to signals in a new child, so that none reaches the launcher's pipe."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, *ENDING, *PASSED_ON):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
