"""Children of a script that uses the launcher: they keep nothing of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import paceline

SOURCES = str(Path(paceline.__file__).parents[1])

GUARDED = """
import os, subprocess, sys, time
from paceline.host import forks
from paceline.launch.supervise.guardian import Guardian

guardian = Guardian()
with forks.passing_on():
    work = subprocess.Popen(["sleep", "600"], start_new_session=True, preexec_fn=guardian.register)
other = os.fork()
if other == 0:
    time.sleep(600)
print(work.pid, other, flush=True)
time.sleep(600)
"""

CANCELLED = """
import os, sys, time
from paceline.launch.supervise.guardian import Canceller

canceller = Canceller(["touch", sys.argv[1]])
other = os.fork()
if other == 0:
    time.sleep(600)
print(other, flush=True)
time.sleep(600)
"""

SIGNALLED = """
import os, signal, sys, time
from paceline.launch.supervise.child import SignalPipe

with SignalPipe() as pipe:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    for _ in range(500):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    print(os.waitstatus_to_exitcode(status) if ended else "runs", pipe.read(), flush=True)
    if not ended:
        os.kill(child, signal.SIGKILL)
"""


def test_guardian_kills_the_job_of_a_launcher_whose_child_lives_on() -> None:
    with _started(GUARDED) as launcher:
        assert launcher.stdout is not None
        work, other = map(int, launcher.stdout.readline().split())
        launcher.kill()
        try:
            deadline = time.monotonic() + 10.0
            while _runs(work) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not _runs(work)
            assert _runs(other), "it is no process of the job"
        finally:
            for pid in (work, other):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_job_of_an_engine_is_cancelled_though_a_child_of_the_launcher_lives_on(tmp_path: Path) -> None:
    with _started(CANCELLED, str(tmp_path / "cancelled")) as launcher:
        assert launcher.stdout is not None
        other = int(launcher.stdout.readline())
        launcher.kill()
        try:
            deadline = time.monotonic() + 10.0
            while not (tmp_path / "cancelled").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            os.kill(other, signal.SIGKILL)


def test_signal_of_a_child_ends_the_child_and_not_the_job() -> None:
    with _started(SIGNALLED) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "-15 []\n"


@contextlib.contextmanager
def _started(script: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"PYTHONPATH": SOURCES}
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], env=env, stdout=subprocess.PIPE, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
