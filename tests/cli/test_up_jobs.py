"""The measuring jobs of ``paceline up``: their output is kept, and nothing of them is left however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli.up import output_of
from paceline.errors import LaunchError

ALONE = ["-n", "1", "-s", "0", "--"]


def left(mark: str) -> list[str]:
    """Return the processes that have a mark in their environment, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_output_is_returned_and_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    text = output_of([*ALONE, "sh", "-c", "echo $A"], "it", {**os.environ, "A": "seen"}, 60.0, lambda pid: None)
    assert "[worker 0] seen" in text
    assert capfd.readouterr() == ("", "")


def test_failure_is_told_with_the_last_lines() -> None:
    with pytest.raises(LaunchError, match=r"(?s)the measure failed with exit code 3; its last lines:.*broken"):
        output_of([*ALONE, "sh", "-c", "echo broken; exit 3"], "the measure", os.environ, 60.0, lambda pid: None)


def test_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    env = {**os.environ, "TEST_MARK_OF": str(tmp_path)}
    with pytest.raises(LaunchError, match=r"the measure did not end within 2 s"):
        output_of([*ALONE, "sh", "-c", "exec sleep 600"], "the measure", env, 2.0, lambda pid: None)
    assert left(f"TEST_MARK_OF={tmp_path}") == []


INTERRUPTED = """
import os, sys
from paceline.cli.launch import TerminatedError
from paceline.cli.up import output_of
try:
    output_of(["-n", "1", "-s", "0", "--", "sh", "-c", "echo > started; exec sleep 600"], "it", os.environ, 600.0,
              lambda pid: None)
except KeyboardInterrupt:
    sys.exit(130)
except TerminatedError:
    sys.exit(143)
"""


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signal_ends_the_job_too(tmp_path: Path, signum: int, code: int) -> None:
    env = {**os.environ, "TEST_MARK_OF": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, env=env, start_new_session=True) as one:
        until = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < until
            assert one.poll() is None
            time.sleep(0.02)
        one.send_signal(signum)
        assert one.wait(60) == code
    until = time.monotonic() + 10
    while processes := left(f"TEST_MARK_OF={tmp_path}"):
        assert time.monotonic() < until, processes
        time.sleep(0.05)
