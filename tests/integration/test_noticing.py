"""A silent process is named in five seconds, given up after ``stall_timeout_s``, and never where it is only slow."""

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from paceline import DistributedOptimizer
from paceline.errors import PacelineError, PeerDiedError
from paceline.testing import LocalJob, tell
from tests.busy.load import busy
from tests.integration.one_key import new_store, one_round, train_until_failure
from tests.integration.test_notice import LEAVER, LEAVES_AT, with_a_loader

NOTICED_WITHIN_S = 5.0
#: Longer than ``heartbeat_timeout_s``, shorter than ``stall_timeout_s``.
STALL_S = 8
#: Longer than ``heartbeat_timeout_s``, too.
STOP_S = 5.0
#: For jobs that give a silent process up as soon as they notice it.
IMPATIENT = {"stall_timeout_s": 4}
#: How long a job trains on a busy host; more in a soak.
BUSY_S = float(os.environ.get("PACELINE_TEST_BUSY_S", "10"))

PTRACE_ATTACH, PTRACE_DETACH = 16, 17


# ---- what runs in the workers --------------------------------------------------------------------------------------


def train_for(seconds):
    """Train; worker 0 says when all stop. Return the last sum and the number of rounds."""
    store = new_store()
    one_round(store)
    tell("training")
    rounds, until = 1, time.monotonic() + seconds
    goes_on = True
    while goes_on:
        last = one_round(store)
        rounds += 1
        stop = store.session.gather("stop", b"stop" if store.rank == 0 and time.monotonic() > until else b"go")
        goes_on = b"stop" not in stop
    return [last, rounds]


def hold_the_lock(seconds):
    """Hold Python's lock in a C call, as a match that backtracks or an extension that does not release it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def stall_once(seconds):
    """Train two rounds; worker 1 holds Python's lock between them."""
    store = new_store()
    one_round(store)
    if store.rank == 1:
        hold_the_lock(seconds)
    return one_round(store)


def stall_or_fail(seconds):
    try:
        return stall_once(seconds)
    except PacelineError as error:
        return [type(error).__name__, str(error)]


# ---- stopped processes ---------------------------------------------------------------------------------------------


def process_of(job, workers, name):
    role, rank = name.split()
    return {"worker": workers, "server": job.servers, "scheduler": [job.scheduler]}[role][int(rank)]


@pytest.mark.parametrize("victim", ["worker 1", "server 1", "scheduler 0"])
def test_stopped_process_is_named_within_five_seconds(victim):
    with LocalJob(3, 2, timeout_s=60, **IMPATIENT) as job:
        workers = job.start_all(train_until_failure)
        assert [worker.heard() for worker in workers] == ["training"] * 3
        stopped = process_of(job, workers, victim)
        stopped.kill(signal.SIGSTOP)
        when_stopped = time.monotonic()
        survivors = [worker for worker in workers if worker is not stopped]
        for kind, text, when, _ in [worker.result(30) for worker in survivors]:
            assert kind == PeerDiedError.__name__
            assert f"{victim} on 127.0.0.1" in text
            assert "died: it was not heard for 4." in text
            assert ": its process is stopped; " in text
            assert when - when_stopped < NOTICED_WITHIN_S
        others = [one for one in (*job.servers, job.scheduler) if one is not stopped]
        assert all(one.wait(30) != 0 for one in others)


@pytest.mark.parametrize("victim", ["worker 1", "server 0", "scheduler 0"])
def test_process_that_is_stopped_for_seconds_goes_on(victim):
    with LocalJob(2, 2, timeout_s=60) as job:
        workers = job.start_all(train_for, STOP_S + 3.0)
        assert [worker.heard() for worker in workers] == ["training"] * 2
        stopped = process_of(job, workers, victim)
        stopped.kill(signal.SIGSTOP)
        time.sleep(STOP_S)
        stopped.kill(signal.SIGCONT)
        first, second = [worker.result() for worker in workers]
        assert first == second == [2.0 * first[1], first[1]]
        assert [one.wait(30) for one in (*job.servers, job.scheduler)] == [0, 0, 0]
        named = [line for line in job.report().splitlines() if f"{victim} on " in line and "not heard for 4." in line]
        assert named
        assert all("its process is stopped; it counts as dead after 30 s" in line for line in named)


def threads_of(pid):
    return [int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()]


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@contextlib.contextmanager
def debugged(pid):
    """Hold all threads of a process as a debugger does."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = threads_of(pid)
    if libc.ptrace(PTRACE_ATTACH, held[0], None, None) != 0:
        pytest.skip(f"processes cannot be traced here: {os.strerror(ctypes.get_errno())}")
    for thread in held[1:]:
        libc.ptrace(PTRACE_ATTACH, thread, None, None)
    until = time.monotonic() + 10
    while state_of(pid) != "t" and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield
    finally:
        for thread in held:
            os.waitpid(thread, 0x40000000)  # __WALL: it waits for threads, too
            libc.ptrace(PTRACE_DETACH, thread, None, None)


def test_process_in_a_debugger_is_waited_for_with_a_warning():
    with LocalJob(2, 1, timeout_s=60, stall_timeout_s=5) as job:
        workers = job.start_all(train_for, STALL_S + 2.0)
        assert [worker.heard() for worker in workers] == ["training"] * 2
        with debugged(workers[1].pid):
            time.sleep(STALL_S)  # longer than any limit
        first, second = [worker.result() for worker in workers]
        assert first == second == [2.0 * first[1], first[1]]
        assert f"worker 1 on 127.0.0.1 (pid {workers[1].pid}): it was not heard for 4." in job.scheduler.output
        assert "a debugger holds its process" in job.scheduler.output


# ---- stalled processes ---------------------------------------------------------------------------------------------


def test_worker_that_holds_pythons_lock_for_seconds_lives_with_a_warning():
    with LocalJob(2, 1, timeout_s=60) as job:
        assert job.run(stall_once, STALL_S) == [4.0, 4.0]
        pid = job.workers[1].pid
        assert job.scheduler.wait(30) == 0
        lines = [line for line in job.scheduler.output.splitlines() if "heard" in line]
        warned, back = lines
        assert f"worker 1 on 127.0.0.1 (pid {pid}): it was not heard for 4." in warned
        assert "although its host answers: its process is stalled" in warned
        assert "it counts as dead after 30 s (PACELINE_STALL_TIMEOUT_S)" in warned
        assert f"worker 1 on 127.0.0.1 (pid {pid}) was heard again after " in back
        # The stalled one does not take the silence that it did not hear for the scheduler's.
        assert "heard" not in job.workers[1].output


def test_stall_that_does_not_end_fails_the_job_and_is_named():
    with LocalJob(2, 1, timeout_s=60, stall_timeout_s=6) as job:
        workers = job.start_all(stall_or_fail, 20)
        kind, text = workers[0].result(30)
        assert kind == PeerDiedError.__name__
        silent = re.search(r"worker 1 on 127\.0\.0\.1 died: it was not heard for ([\d.]+) s ", text)
        assert silent, text
        assert 6 <= float(silent[1]) < 20, "later than it should be, and the worker is heard again"
        assert "although its host answers: its process is stalled" in text
        assert "PACELINE_STALL_TIMEOUT_S" in text
        assert job.scheduler.wait(30) == 76


# ---- a worker under notice -----------------------------------------------------------------------------------------


def test_worker_under_notice_has_left_two_seconds_after_its_step():
    with LocalJob(num_workers=3, num_servers=2) as job:
        workers = job.start_all(with_a_loader, "SIGTERM")
        assert workers[LEAVER].heard(60) == LEAVES_AT
        told = time.monotonic()
        assert workers[LEAVER].wait(60) == 0, workers[LEAVER].output
        assert time.monotonic() - told < 2
        for rank in (0, 2):
            workers[rank].result(60)


# ---- a busy host ---------------------------------------------------------------------------------------------------


def train_a_network(seconds):
    """Train a network with an optimizer; return a digest of the weights and the number of steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(400, 600), torch.nn.Tanh(), torch.nn.Linear(600, 100))
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), "dist_sync", model=model)
    store, steps, until = optimizer.kvstore, 0, time.monotonic() + seconds
    tell("training")
    while b"stop" not in store.session.gather("stop", b"stop" if time.monotonic() > until else b"go"):
        optimizer.zero_grad()
        model(torch.randn(64, 400)).square().mean().backward()
        optimizer.step()
        steps += 1
    weights = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    return [hashlib.sha256(weights.numpy().tobytes()).hexdigest(), steps]


@pytest.mark.timeout(300)
def test_busy_host_is_no_failure():
    with LocalJob(2, 2, timeout_s=60) as job:
        workers = job.start_all(train_a_network, BUSY_S)
        assert [worker.heard() for worker in workers] == ["training"] * 2
        with busy(20):
            first, second = [worker.result(120 + BUSY_S) for worker in workers]
        assert first == second
        assert first[1] > 0
        assert [one.wait(60) for one in (*job.servers, job.scheduler)] == [0, 0, 0]
        assert "died" not in job.report()
