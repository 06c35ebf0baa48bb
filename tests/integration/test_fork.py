"""Children that a script or a library forks: they disturb nobody, and cannot use the store."""

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline import DistributedOptimizer, kvstore
from paceline.errors import PacelineError
from paceline.testing import LocalJob, tell
from tests.clusters.forked import ENDS_WITHIN_S, end_of, errors_in_a_child, forked
from tests.integration.one_key import new_store, one_round

NOTICED_WITHIN_S = 5.0
SOURCES = str(Path(paceline.__file__).parents[1])

WAYS = {"shared": {}, "sockets": {"shared_memory": False}, "tcp": {"shared_memory": False, "unix_sockets": False}}


# ---- what runs in the workers --------------------------------------------------------------------------------------


def raise_error() -> None:
    raise ArithmeticError("only in the child")


def square(number: int) -> int:
    return number * number


def fork_in_all_ways():
    """Fork children of all kinds between rounds; returns how they ended, and the values of the rounds."""
    store = new_store()
    values, ends = [one_round(store)], {}
    ends["os._exit"] = end_of(forked(lambda: os._exit(3)))
    values.append(one_round(store))
    ends["sys.exit"] = end_of(forked(lambda: sys.exit(4)))
    values.append(one_round(store))
    ends["exception"] = end_of(forked(raise_error))
    values.append(one_round(store))
    ends["close"] = end_of(forked(store.close))
    values.append(one_round(store))
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=square, args=(2,))
    process.start()
    process.join(ENDS_WITHIN_S)
    ends["process"] = process.exitcode
    values.append(one_round(store))
    with fork.Pool(2) as pool:
        ends["pool"] = pool.map_async(square, [2, 3]).get(ENDS_WITHIN_S)
        values.append(one_round(store))
    ends["preexec"] = subprocess.run(["true"], preexec_fn=os.getpid, timeout=ENDS_WITHIN_S, check=False).returncode
    values.append(one_round(store))
    return ends, values


def fork_while_threads_push():
    """Fork from the main thread, while another one pushes, and a third one logs; returns how the children ended."""
    store = new_store()
    stop = threading.Event()
    log = logging.getLogger("test")

    def push() -> None:
        while not stop.is_set():
            one_round(store)

    def write() -> None:
        while not stop.is_set():
            log.warning("from a thread")
            stop.wait(0.0005)

    def in_child() -> None:
        log.warning("from a child")

    threads = [threading.Thread(target=push), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    ends = [end_of(forked(in_child)) for _ in range(20)]
    stop.set()
    for thread in threads:
        thread.join()
    return ends


def fork_and_wait_to_be_killed():
    """Fork a child that lives on, and train for ever."""
    store = new_store()
    one_round(store)
    child = forked(lambda: time.sleep(600)) if store.rank == 1 else 0
    tell(child)
    try:
        while True:
            one_round(store)
    except PacelineError as error:
        return [str(error), time.monotonic()]


def sockets_in_a_child():
    """Return the sockets of this process that a child has, too."""
    ours = sockets()
    store = new_store()
    one_round(store)
    here = sockets() - ours
    reads, writes = os.pipe()

    def report() -> None:
        os.write(writes, " ".join(sorted(sockets() & here)).encode())

    end = end_of(forked(report))
    os.close(writes)
    return [end, len(here), os.read(reads, 65536).decode().split()]


def sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {one for one in found if one.startswith("socket:")}


def use_the_store_in_a_child():
    """Try to use the store in a child; returns what each attempt raised there."""
    model = torch.nn.Linear(4, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    store = new_store()
    one_round(store)
    attempts = {
        "push": lambda: store.push("w", torch.full((1000,), 7.0)),
        "pull": lambda: store.pull("w", torch.zeros(1000)),
        "pushpull": lambda: one_round(store),
        "init": lambda: store.init("other", torch.zeros(3)),
        "barrier": store.barrier,
        "stats": store.stats,
        "create": lambda: kvstore.create("dist_sync", namespace="of a child"),
        "backward": lambda: model(torch.ones(2, 4)).mean().backward(),
    }
    found = errors_in_a_child(attempts)
    end = int(found.pop("end"))
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    return [end, found, one_round(store), os.getpid()]


def train_with_a_forking_optimizer():
    store = kvstore.create("dist_sync")
    store.set_optimizer("forking:Forking", lr=1.0)
    store.init("w", torch.zeros(4))
    value = torch.ones(4)
    for _ in range(3):
        value = torch.ones(4)
        store.pushpull("w", value)
    return value.tolist()


FORKING = """
import os, sys
import torch

class Forking(torch.optim.SGD):
    def step(self, closure=None):
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        os.waitpid(pid, 0)
        return super().step(closure)
"""


# ---- children are harmless -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_children_of_all_kinds_end_at_once_and_disturb_nobody(way):
    with LocalJob(2, 2, timeout_s=60, **WAYS[way]) as job:
        results = job.run(fork_in_all_ways)
        assert [job.scheduler.wait(30), *(server.wait(30) for server in job.servers)] == [0, 0, 0]
    for ends, values in results:
        assert ends == {
            "os._exit": 3, "sys.exit": 4, "exception": 1, "close": 0, "process": 0, "pool": [4, 9], "preexec": 0
        }  # fmt: skip
        assert values == [2.0 * (i + 1) for i in range(len(values))]


def test_locks_that_threads_hold_at_the_fork_do_not_hang_the_child():
    with LocalJob(1, 1, timeout_s=60) as job:
        assert job.run(fork_while_threads_push) == [[0] * 20]


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_death_is_noticed_although_a_child_lives_on(way):
    with LocalJob(2, 2, timeout_s=60, **WAYS[way]) as job:
        workers = job.start_all(fork_and_wait_to_be_killed)
        child = [worker.heard() for worker in workers][1]
        killed = time.monotonic()
        workers[1].kill(signal.SIGKILL)
        text, when = workers[0].result(60)
        assert Path(f"/proc/{child}").exists()
        assert "worker 1 on 127.0.0.1 died" in text
        assert when - killed < NOTICED_WITHIN_S


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_child_has_no_copies_of_connections(way):
    with LocalJob(1, 2, timeout_s=60, **WAYS[way]) as job:
        [(end, number, copies)] = job.run(sockets_in_a_child)
    assert end == 0
    assert number >= 4, "two connections to the scheduler, one to each server"
    assert copies == []


def test_use_of_the_store_in_a_child_says_why_it_cannot():
    with LocalJob(1, 1, timeout_s=60) as job:
        [(end, found, value, pid)] = job.run(use_the_store_in_a_child)
    assert end == 0
    assert len(found) == 8
    for name, text in found.items():
        assert f"was forked from worker 0 (pid {pid})" in text, name
        assert "spawn" in text, name
    assert value == 2.0, "nothing that the child has tried reached the store"


def test_server_whose_optimizer_forks_goes_on(tmp_path):
    (tmp_path / "forking.py").write_text(FORKING)
    path = os.pathsep.join([SOURCES, str(tmp_path)])
    with LocalJob(1, 1, timeout_s=60, environment={"PYTHONPATH": path}, allow="forking:Forking") as job:
        assert job.run(train_with_a_forking_optimizer) == [[-3.0] * 4]
        assert job.servers[0].wait(30) == 0


# ---- data loaders --------------------------------------------------------------------------------------------------

LOADING = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from paceline import DistributedOptimizer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), {store!r}, model=model)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, num_workers=2, persistent_workers={persistent},
                    multiprocessing_context="fork")
seen = 0
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        seen += 1
        if {breaks} and epoch == 1:
            break
print("steps", seen, flush=True)
sys.exit({code})
"""


@pytest.mark.parametrize(
    ("store", "persistent", "breaks", "code"),
    [("dist_sync", False, False, 0), ("dist_sync", True, True, 0), ("dist_async", True, False, 5)],
)
def test_job_with_forked_data_loaders_ends_as_its_script_says(store, persistent, breaks, code, tmp_path):
    marker = f"PACELINE_TEST_MARKER=loaders-{os.getpid()}-{tmp_path.name}"
    script = tmp_path / "train.py"
    script.write_text(LOADING.format(store=store, persistent=persistent, breaks=breaks, code=code))
    env = os.environ | dict([marker.split("=")]) | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "1", "--", sys.executable, str(script)]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ended.stdout.count(f"steps {9 if breaks else 16}") == 2
    assert processes_of(marker) == []


def processes_of(marker: str) -> list[int]:
    """Return the processes that have a marker in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
