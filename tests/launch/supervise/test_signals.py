"""Signals that do not end a job: those that workers handle, and Ctrl-Z, which pauses all of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from paceline.launch import processes
from tests.launch.supervise.conftest import wait_until

MakeJob = Callable[..., Any]

STAYS = "echo tcp://127.0.0.1:5555 >/dev/fd/${PACELINE_READY_FD:-$READY_FD}; exec sleep 1000"
#: Handles the signals of users, as a script that saves; what it has started does not.
HANDLES = "trap 'echo saves' USR1; trap 'echo $PPID >gone; exit 0' USR2; sleep 1000 & echo $PPID >up; wait; wait; wait"
#: Handles none.
GOES_ON = "until test -e gone; do sleep 0.02; done; sleep 0.2"

everywhere = pytest.mark.parametrize("agents", [False, True], ids=["here", "on other hosts"])


@everywhere
def test_signals_of_users_reach_the_workers_that_handle_them_and_end_no_other(agents: bool, make_job: MakeJob) -> None:
    job = make_job(leave_s=0.2, terminate_s=0.2).start(HANDLES, GOES_ON, scheduler=None, agents=agents)
    job.wait_for_file("up")
    job.send(signal.SIGUSR1)
    wait_until(lambda: "[worker 0] saves" in job.out(), "the first signal")
    job.send(signal.SIGUSR2)
    assert job.wait() == 0, "\n".join(job.err())
    assert "[launch] SIGUSR1: for the workers that handle it" in job.err()


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP])
def test_agent_and_scheduler_live_on_when_an_engine_signals_all_processes(signum: int, make_job: MakeJob) -> None:
    """As ``scancel --signal`` does."""
    job = make_job(leave_s=0.2).start(
        "echo $PPID >up; read x <all-done", scheduler=f"echo $$ >started; {STAYS}", agents=True
    )
    for name in ("up", "started"):
        os.kill(int(job.wait_for_file(name)), signum)
    (job.folder / "all-done").write_text("\n")
    assert job.wait() == 0, "\n".join(job.err())


@everywhere
def test_stop_by_the_terminal_pauses_the_whole_job(agents: bool, make_job: MakeJob) -> None:
    job = make_job(leave_s=0.2).start(
        "echo $$ >up; read x <all-done", scheduler=STAYS, agents=agents
    )  # fmt: skip
    worker = psutil.Process(int(job.wait_for_file("up")))
    job.send(signal.SIGTSTP)
    os.waitid(os.P_PID, job.process.pid, os.WSTOPPED | os.WNOWAIT)
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker to stop")
    job.send(signal.SIGCONT)
    (job.folder / "all-done").write_text("\n")
    assert job.wait() == 0, "\n".join(job.err())


def test_quit_ends_a_job_as_ctrl_c_does(make_job: MakeJob) -> None:
    job = make_job(leave_s=1.0, survivors_s=1.0).start(
        "trap 'echo saves; exit 0' QUIT; echo >up; while :; do sleep 0.05; done", scheduler=STAYS
    )
    job.wait_for_file("up")
    job.send(signal.SIGQUIT)
    assert job.wait() == 131
    assert job.out() == ["[worker 0] saves"]
    assert job.left() == []


def test_where_the_system_does_not_say_what_a_process_handles_the_command_itself_gets_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(
        processes, "_of", lambda sessions: [(2**22 + 1, psutil.Process()), (os.getpid(), psutil.Process())]
    )
    monkeypatch.setattr(processes.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    processes.pass_on(signal.SIGUSR1, {1})
    assert sent == [(os.getpid(), signal.SIGUSR1)]
