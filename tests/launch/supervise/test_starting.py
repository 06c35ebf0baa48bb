"""Processes that start slowly, under the real launcher and scheduler: those that get CPU time are waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.launch.supervise.conftest import Job

MakeJob = Callable[..., Job]

START_TIMEOUT_S = 4

SCHEDULER = f"""
export PACELINE_ROLE=scheduler PACELINE_SCHEDULER=tcp://127.0.0.1:0
export PACELINE_READY_FD=${{READY_FD:-$PACELINE_READY_FD}} PACELINE_ENDED_FD=${{ENDED_FD:-$PACELINE_ENDED_FD}}
exec {sys.executable} -m paceline scheduler
"""
#: A member that does not need torch.
JOIN = """
import os, sys, time
from paceline.config import from_environment
from paceline.net.lifeline import Lifeline
from paceline.net import Security
from paceline.net.sockets import SocketHub

settings = from_environment(role=sys.argv[1], scheduler=os.environ["ADDRESS"])
lifeline = Lifeline(settings, SocketHub(Security.of(settings)), "tcp://127.0.0.1:1" * (sys.argv[1] == "server"))
lifeline.join()
print("joined", flush=True)
while sys.argv[1] == "server" and not (lifeline.shutdown or lifeline.failure):
    time.sleep(0.05)
lifeline.leave()
"""
#: Uses a tenth of a core, as a process on a host with twenty others on two cores does.
CRAWL = """
import time
until = time.monotonic() + 6
while time.monotonic() < until:
    began = time.monotonic()
    while time.monotonic() - began < 0.02: pass
    time.sleep(0.18)
"""


def member(role: str, before: str = "") -> str:
    return f"cat > {role}.py <<'EOF'\n{before}{JOIN}\nEOF\nexec {sys.executable} {role}.py {role}"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    monkeypatch.setenv("PACELINE_START_TIMEOUT_S", str(START_TIMEOUT_S))


@pytest.mark.parametrize("agents", [False, True], ids=["here", "behind agents"])
def test_worker_that_starts_on_a_busy_host_is_waited_for(make_job: MakeJob, agents: bool) -> None:
    job = make_job().start(member("worker", CRAWL), scheduler=SCHEDULER, servers=[member("server")], agents=agents)
    assert job.wait() == 0, job.err()
    assert sorted(line.split()[-1] for line in job.out()) == ["joined", "joined"]
    assert any("worker 0 (" in line and "still starts on a busy host" in line for line in [*job.out(), *job.err()])


def test_worker_that_sleeps_instead_of_joining_is_named(make_job: MakeJob) -> None:
    job = make_job(survivors_s=1).start("exec sleep 60", scheduler=SCHEDULER, servers=[member("server")])
    assert job.wait() == 1
    text = "\n".join([*job.out(), *job.err()])
    assert f"worker 0 did not join within {START_TIMEOUT_S} s; look at their output, or raise " in text
