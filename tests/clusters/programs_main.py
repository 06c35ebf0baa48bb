"""What a forked process of :mod:`tests.clusters.programs` does: it is ``python WORDS``, and forks a launcher's job."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NoReturn

from paceline.host import forks
from paceline.launch.supervise import child
from tests.clusters.fork_server import read_at_start
from tests.clusters.forked_program import be_program

_start = child._popen


def run(directory: str, errors: int, words: list[str]) -> None:
    """Do what ``python WORDS`` does in a directory; ``errors`` is the file descriptor for stderr."""
    if errors != 2:
        os.dup2(errors, 2)
        os.close(errors)
    os.chdir(directory)
    _open_streams()
    child._popen = _fork_or_start  # type: ignore[assignment]  # the part of subprocess.Popen that is used
    _interpret(words)


def _open_streams() -> None:
    """Make objects for stdout and stderr, which were other files when the forking process has started."""
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it stays open
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _interpret(words: Sequence[str]) -> None:
    """Run a script, or ``-m`` and a module, or ``-c`` and code, with its arguments."""
    match list(words):
        case ["-P", *rest]:
            sys.path[0] = ""  # roles append it, if they are asked to hide it
            _interpret(rest)
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path[0] = sys.path[0] and os.getcwd()  # not after -P
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")


class _Forked:
    """A forked process of a launcher's job, with the part of ``subprocess.Popen`` that a launcher uses."""

    stdin = None

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr

        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Reap the process if it has ended, and return its exit code (negative: the signal that ended it)."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def _fork_or_start(
    argv: Sequence[str], env: Mapping[str, str], prepare: Callable[[], None], pass_fds: Sequence[int], stdin: int
) -> Any:
    """Fork a process if it is a Python program like this one, else start it; see ``child._popen``."""
    is_python = argv[0] == sys.executable and len(argv) > 1 and (argv[1] in ("-P", "-m", "-c") or argv[1][0] != "-")
    if not is_python or stdin != subprocess.DEVNULL or read_at_start(env) != read_at_start(os.environ):
        return _start(argv, env, prepare, pass_fds, stdin)
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(argv[1:], env, prepare, pass_fds, out_write, err_write)
    os.close(out_write)
    os.close(err_write)
    return _Forked(pid, open(out_read, "rb", buffering=0), open(err_read, "rb", buffering=0))


def _become(
    words: Sequence[str],
    env: Mapping[str, str],
    prepare: Callable[[], None],
    pass_fds: Sequence[int],
    output: int,
    errors: int,
) -> NoReturn:
    """Be a process of the launcher's job: never return into the launcher, whose copy this process is."""

    def run() -> None:
        os.setsid()
        for fd, wanted in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
            os.dup2(fd, wanted)
        prepare()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _forget_the_launcher(pass_fds)
        _open_streams()
        os.environ.clear()
        os.environ.update(env)
        _interpret(words)

    be_program(run)


def _forget_the_launcher(pass_fds: Sequence[int]) -> None:
    """Close its files; its objects stay as they are, as what they would close later belongs to this process."""
    gc.freeze()
    forks._actions.clear()
    forks._passing_on.active = False
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            with contextlib.suppress(OSError):  # the descriptor that listed them is gone already
                os.close(int(name))
