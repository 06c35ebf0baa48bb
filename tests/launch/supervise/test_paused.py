"""A launcher that is paused, by its reader or by a signal, is no dead one: its job goes on when it does."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.launch.supervise.console import _MOST_UNWRITTEN
from tests.launch.supervise.conftest import wait_until

MakeJob = Callable[..., Any]

#: Silence after which an agent takes its launcher for dead here, and a time that is longer.
SILENCE_S, LONG_S = 0.5, 1.5

STAYS = "echo tcp://127.0.0.1:5555 >/dev/fd/$PACELINE_READY_FD; exec sleep 1000"
#: More than the launcher, the agent and the pipes between them hold.
LINES = 4 * _MOST_UNWRITTEN // 1024
TALKS = f"printf '%01024d\\n' $(seq {LINES}); echo end >&2"


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as reader:
        return reader.read()


@pytest.mark.parametrize("agents", [False, True], ids=["here", "on other hosts"])
def test_output_that_nobody_reads_for_long_pauses_the_job(agents: bool, make_job: MakeJob) -> None:
    read_fd, write_fd = os.pipe()
    job = make_job(leave_s=0.2, survivors_s=0.2).start(
        TALKS, scheduler=None, out_fd=write_fd, agents=agents, silence_s=SILENCE_S
    )
    os.close(write_fd)
    time.sleep(LONG_S)
    assert job.process.poll() is None
    lines = read_all(read_fd).splitlines()
    assert job.wait() == 0, "\n".join(job.err())
    assert lines == [b"[worker 0] %01024d" % number for number in range(1, 1 + LINES)]


def test_stopped_launcher_goes_on_with_its_job(make_job: MakeJob) -> None:
    gated = "echo up >up; until test -e go; do sleep 0.02; done; seq 3"
    job = make_job(leave_s=0.2).start(gated, scheduler=None, agents=True, silence_s=SILENCE_S)
    job.wait_for_file("up")
    job.send(signal.SIGSTOP)
    time.sleep(LONG_S)
    job.send(signal.SIGCONT)
    (job.folder / "go").touch()
    assert job.wait() == 0, "\n".join(job.err())
    assert job.out() == ["[worker 0] 1", "[worker 0] 2", "[worker 0] 3"]


def test_time_in_which_the_launcher_is_stopped_counts_for_no_deadline(make_job: MakeJob) -> None:
    stops_launcher = """echo tcp://127.0.0.1:5555 >/dev/fd/$READY_FD; echo '["complete"]' >/dev/fd/$READY_FD
        while read -r line; do case $line in *exited*) break;; esac; done </dev/fd/$ENDED_FD
        sleep 0.3; kill -STOP $PPID; until test -e go; do sleep 0.02; done"""
    job = make_job(leave_s=1.0).start("true", scheduler=stops_launcher, silence_s=SILENCE_S)
    os.waitid(os.P_PID, job.process.pid, os.WSTOPPED | os.WNOWAIT)
    time.sleep(1.2)
    job.send(signal.SIGCONT)
    time.sleep(0.1)
    (job.folder / "go").touch()
    assert job.wait() == 0
    assert job.err() == []


def test_signal_ends_a_job_whose_output_nobody_reads(make_job: MakeJob) -> None:
    read_fd, write_fd = os.pipe()
    job = make_job(terminate_s=0.2).start(f"echo up >up; {TALKS}", scheduler=None, out_fd=write_fd)
    os.close(write_fd)
    job.wait_for_file("up")
    job.send(signal.SIGINT)
    assert job.wait() == 130
    assert job.left() == []
    os.close(read_fd)


def test_signal_for_workers_ends_no_launcher_whose_last_lines_wait_for_a_reader(make_job: MakeJob) -> None:
    read_fd, write_fd = os.pipe()
    full = b"\n" * fcntl.fcntl(write_fd, fcntl.F_GETPIPE_SZ)
    os.write(write_fd, full)
    job = make_job().start("echo end; echo >up", scheduler=None, out_fd=write_fd)
    os.close(write_fd)
    job.wait_for_file("up")
    wait_until(lambda: not any("echo end" in line for line in job.left() if "run_plan" not in line), "the worker's end")
    job.send(signal.SIGUSR1)
    time.sleep(0.1)
    assert read_all(read_fd) == full + b"[worker 0] end\n"
    assert job.wait() == 0


def test_agents_end_when_a_paused_launcher_is_killed(make_job: MakeJob) -> None:
    job = make_job().start("echo up >up; exec sleep 1000", scheduler=None, agents=True)
    job.wait_for_file("up")
    job.send(signal.SIGSTOP)
    job.process.kill()
    job.wait()
    job.wait_until_nothing_is_left()
