"""Whatever ends a job, the launcher names the process that failed first, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from paceline import kvstore
from paceline.errors import PacelineError, PeerDiedError
from paceline.testing import LocalJob, listen, tell
from paceline.worker.current import current_session
from tests.blame.trial import START_TIMEOUT_S, Outcome, Trial, hit, named, run

#: role, rank, fault, phase, slow, catch.
FAULTS = [
    ("worker", 1, "raise", "rounds", True, False),
    ("worker", 1, "raise", "joined", True, True),
    ("worker", 1, "exit3", "rounds", False, False),
    ("worker", 0, "SystemExit3", "mid-round", False, True),
    ("worker", 1, "os._exit0", "rounds", False, False),
    ("worker", 1, "leave", "joined", False, False),
    ("worker", 1, "leave", "mid-round", False, False),
    ("worker", 0, "leave", "end", False, False),
    ("worker", 1, "leave", "start", False, False),
    ("scheduler", 0, "SIGSTOP", "rounds", False, True),
    ("worker", 1, "SIGSTOP", "rounds", False, False),
    ("server", 0, "SIGKILL", "barrier", False, True),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[object, ...], Outcome]:
    folder = tmp_path_factory.mktemp("blame")
    trials = [
        Trial(2, 1, role, rank, fault, phase, 0.1, slow, catch, number)
        for number, (role, rank, fault, phase, slow, catch) in enumerate(FAULTS)
    ]
    with ThreadPoolExecutor(3) as pool:
        ran = list(pool.map(lambda trial: run(trial, folder / str(trial.seed)), trials))
    return dict(zip(FAULTS, ran, strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault[:4])))
def test_first_failure_is_named(fault: tuple[object, ...], outcomes: dict[tuple[object, ...], Outcome]) -> None:
    outcome = outcomes[fault]
    assert outcome.problem == "", outcome.output


@pytest.mark.timeout(600)
def test_worker_that_ends_before_it_joins_is_noticed_before_the_start_timeout(
    outcomes: dict[tuple[object, ...], Outcome],
) -> None:
    outcome = outcomes["worker", 1, "leave", "start", False, False]
    assert "its process ended before it joined: exit code 0" in outcome.output
    assert outcome.seconds < START_TIMEOUT_S


#: Exit code of the launcher after a fault.
CODES = {
    ("worker", 1, "raise", "rounds", True, False): 1,
    ("worker", 1, "exit3", "rounds", False, False): 3,
    ("worker", 1, "leave", "mid-round", False, False): 0,
    ("worker", 1, "SIGSTOP", "rounds", False, False): 1,
    ("scheduler", 0, "SIGSTOP", "rounds", False, True): 1,
    ("server", 0, "SIGKILL", "barrier", False, True): 137,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", CODES, ids=lambda fault: "-".join(map(str, fault[:4])))
def test_launcher_ends_with_the_exit_code_of_the_first_failure(
    fault: tuple[object, ...], outcomes: dict[tuple[object, ...], Outcome]
) -> None:
    assert outcomes[fault].code == CODES[fault], outcomes[fault].output


def test_signal_that_came_after_the_end_is_no_fault() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not hit(ended.pid, signal.SIGSTOP), "its parent has not removed it yet"
    ended.wait()
    assert not hit(ended.pid, signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_signal_before_the_end_is_one(signum: int) -> None:
    lives = subprocess.Popen(["sleep", "60"])
    assert hit(lives.pid, signal.SIGSTOP)
    assert hit(lives.pid, signum)
    assert lives.wait() == -signum


# ---- leaving, without a launcher -------------------------------------------------------------------------------------


def train(rounds: int = 5) -> list[float]:
    store = kvstore.create("dist_sync", namespace="train")
    store.set_updater("add")
    store.init("w", torch.zeros(10))
    value = torch.ones(10)
    tell("training")
    listen()
    for _ in range(rounds):
        value.fill_(1.0)
        store.pushpull("w", value)
    store.barrier()
    return [value[0].item()]


def join_only() -> str:
    current_session()
    tell("here")
    return "ended"


def train_alone() -> float:
    store = kvstore.create("dist_sync", namespace="train")
    store.init("w", torch.zeros(10))
    value = torch.ones(10)
    for _ in range(3):
        store.pushpull("w", value)
    return value[0].item()


def close_unused() -> str:
    store = kvstore.create("dist_sync", namespace="train")
    store.close()
    tell("closed")
    listen()
    return "ended"


def push_and_end() -> str:
    store = kvstore.create("dist_sync", namespace="train")
    store.set_updater("add")
    store.init("w", torch.zeros(10))
    tell("training")
    listen()
    store.push("w", torch.ones(10))
    return "ended"


def fail_to_finish() -> str:
    store = kvstore.create("dist_sync", namespace="train")
    store.set_updater("add")
    store.init("w", torch.zeros(10))

    def broken() -> None:
        raise PacelineError("this wait fails")

    store.lifecycle.wait_for_own_requests = broken  # type: ignore[method-assign, attr-defined]
    tell("training")
    listen()
    return "ended"


def train_until_failure() -> str:
    try:
        train(10_000)
    except PeerDiedError as error:
        return str(error)
    return ""


def test_nobody_waits_for_a_worker_that_joined_and_has_no_store() -> None:
    with LocalJob(2, 1, timeout_s=30) as job:
        ended = job.start(1, join_only)
        worker = job.start(0, train)
        assert ended.result() == "ended"
        assert worker.heard() == "training"
        worker.tell("go")
        assert worker.result() == [5.0]


def test_nobody_waits_for_a_worker_that_closed_a_store_it_never_used() -> None:
    with LocalJob(2, 1, timeout_s=30) as job:
        other = job.start(1, close_unused)
        worker = job.start(0, train_alone)
        assert other.heard() == "closed"
        assert worker.result() == 1.0
        other.tell("end")
        assert other.result() == "ended"


def test_what_a_worker_pushed_before_it_ended_counts() -> None:
    with LocalJob(2, 1, timeout_s=30) as job:
        workers = [job.start(0, train), job.start(1, push_and_end)]
        assert [worker.heard() for worker in workers] == ["training"] * 2
        for worker in workers:
            worker.tell("go")
        assert workers[1].result() == "ended"
        assert workers[0].result() == [6.0]


def test_worker_that_cannot_finish_at_exit_fails_the_job() -> None:
    with LocalJob(2, 1, timeout_s=30) as job:
        workers = [job.start(0, train_until_failure), job.start(1, fail_to_finish)]
        assert [worker.heard() for worker in workers] == ["training"] * 2
        for worker in workers:
            worker.tell("go")
        assert "worker 1 on 127.0.0.1 died: it could not leave: PacelineError: this wait fails" in workers[0].result()


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

ENDLESS = """
import torch
from paceline import kvstore

store = kvstore.create("dist_sync")
store.set_updater("add")
store.init("w", torch.zeros(10))
value = torch.ones(10)
print("training", flush=True)
while True:
    store.pushpull("w", value)
"""


def test_ctrl_c_shows_the_script_and_not_the_transport(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    argv = [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "1", "--", sys.executable, "endless.py"]

    def take_sigint() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with subprocess.Popen(
        argv,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=take_sigint,  # noqa: PLW1509
    ) as launcher:
        try:
            assert launcher.stdout is not None
            lines = []
            while sum("training" in line for line in lines) < 2:
                lines.append(launcher.stdout.readline())
                assert lines[-1], "".join(lines)
            time.sleep(0.5)
            launcher.send_signal(signal.SIGINT)
            output = "".join(lines) + launcher.stdout.read()
            assert launcher.wait(60) == 130
        finally:
            launcher.kill()
    assert "KeyboardInterrupt" in output
    assert "endless.py" in output
    assert not re.search(r'File ".*/paceline/', output), output
    assert named(output) == ""
