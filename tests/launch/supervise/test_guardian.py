"""What is left of a job whose launcher was killed with SIGKILL: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import processes
from paceline.launch.supervise.guardian import sweep

STAYS = "echo tcp://127.0.0.1:5555 >/dev/fd/$READY_FD; exec sleep 1000"
MakeJob = Callable[..., Any]


@pytest.mark.parametrize(
    "worker",
    [
        "echo up >up; exec sleep 1000",
        "sleep 1000 & echo up >up; wait",
        "(sleep 1000 & sleep 1000) & echo up >up; exit 0",
        "echo up >up; kill -STOP $$",
        "trap '' TERM INT HUP; sleep 1000 & echo up >up; while :; do sleep 1000; done",
        "sh -c 'kill -STOP $$' & echo up >up; wait",
    ],
)
def test_killed_launcher_leaves_nothing_running(worker: str, make_job: MakeJob) -> None:
    job = make_job().start(worker, "exec sleep 1000", scheduler=STAYS, servers=("sleep 1000 & wait",))
    job.wait_for_file("up")
    job.send(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.wait_until_nothing_is_left()


@pytest.mark.parametrize("delay_ms", range(60, 200, 20))
def test_launcher_killed_while_it_starts_processes_leaves_nothing_running(delay_ms: int, make_job: MakeJob) -> None:
    job = make_job().start(*["sleep 1000 & wait"] * 20, scheduler=STAYS)
    time.sleep(delay_ms / 1000)  # the moment of death is what this test varies
    job.send(signal.SIGKILL)
    job.wait()
    job.wait_until_nothing_is_left()


def test_killed_process_group_of_the_launcher_leaves_nothing_running(make_job: MakeJob) -> None:
    job = make_job().start("sleep 1000 & echo up >up; wait", scheduler=STAYS, own_group=True)
    job.wait_for_file("up")
    os.killpg(job.process.pid, signal.SIGKILL)
    job.wait()
    job.wait_until_nothing_is_left()


def test_processes_die_with_the_launcher_even_without_a_guardian(make_job: MakeJob) -> None:
    job = make_job().start("echo up >up; exec sleep 1000", scheduler=STAYS)
    job.wait_for_file("up")
    launcher = Path("/proc", str(job.process.pid))
    children = (launcher / "task" / launcher.name / "children").read_text().split()
    same = [
        pid for pid in children if Path("/proc", pid, "cmdline").read_bytes() == (launcher / "cmdline").read_bytes()
    ]
    os.kill(int(same[0]), signal.SIGKILL)
    job.send(signal.SIGKILL)
    job.wait()
    job.wait_until_nothing_is_left()


def test_sweep_ends_every_group_of_a_session_and_no_other() -> None:
    script = (
        "import os, time\nos.fork()\nif os.fork():\n    os.setpgid(0, 0)\nprint('up', flush=True)\ntime.sleep(1000)"
    )
    with (
        subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE) as mine,
        subprocess.Popen(["sleep", "1000"], start_new_session=True) as other,
    ):
        assert mine.stdout is not None
        for _ in range(3):
            mine.stdout.readline()
        assert processes.living({mine.pid, other.pid}) == {mine.pid, other.pid}
        sweep({mine.pid})
        assert processes.living({mine.pid, other.pid}) == {other.pid}
        other.kill()
