"""Runs Python programs, such as ``paceline launch``, as forked processes: those of a job start seconds earlier for it.

A program does what ``python WORDS`` does, in a process of its own that is forked by :mod:`tests.clusters.fork_server`.
If it is a launcher, it forks each process of its job that is a Python program, and starts all others; its pipes, its
guardian and its signals are the usual ones. What is read from ``/proc/PID/cmdline`` is that of the forking process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.launch.supervise.guardian import Guardian
from paceline.testing.job import common_environment
from tests.clusters.fork_server import ForkedProcess, fork_or_start

_MAIN = Path(__file__).with_name("programs_main.py")


@contextlib.contextmanager
def started(
    words: Sequence[object],
    output: int,
    errors: int,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Iterator[ForkedProcess]:
    """Start ``python WORDS``; the block's end kills what still runs of it.

    Args:
        words: script, ``-m`` and a module, or ``-c`` and code; and arguments.
        output: file descriptor for its stdout.
        errors: file descriptor for its stderr.
        env: variables that differ from this process's. Those that an interpreter reads at its start cannot.
        cwd: its directory, by default this one's.
    """
    whole = dict(os.environ) | common_environment() | dict(env or {})
    with tempfile.TemporaryDirectory(prefix="program-") as folder, contextlib.closing(Guardian()) as guardian:
        task = Path(folder, "task.json")
        arguments = [os.path.abspath(cwd or "."), errors, list(map(str, words))]
        content = {"file": str(_MAIN), "function": "run", "arguments": arguments, "result": str(Path(folder, "result"))}
        task.write_text(json.dumps(content))
        argv = [sys.executable, "-m", "paceline.testing.worker", str(task)]
        process = fork_or_start(argv, whole, output, guardian, [errors])
        assert isinstance(process, ForkedProcess), "it has variables that an interpreter reads at its start"
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60.0)


def run(
    words: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout_s: float = 120.0,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` to its end and return its exit code and what it has printed.

    Raises:
        subprocess.TimeoutExpired: it still runs.
        subprocess.CalledProcessError: it has failed, and ``check`` is true.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        with started(words, output.fileno(), errors.fileno(), env=env, cwd=cwd) as process:
            code = process.wait(timeout_s)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    done = subprocess.CompletedProcess([sys.executable, *map(str, words)], code, *texts)
    if check:
        done.check_returncode()
    return done
