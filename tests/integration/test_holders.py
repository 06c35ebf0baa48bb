"""A process with the job's key fills no memory of scheduler and server, before its claim and after it.

All processes of the job have one address, as behind a NAT: half of the workers join while the attack goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from paceline import kvstore
from paceline.errors import PacelineError
from paceline.net.claims import Bounds
from paceline.server.meetings import MAX_BOARD_WAITS
from paceline.testing import LocalJob, listen, tell
from paceline.wire import messages as m
from paceline.wire.limits import MAX_GATHER_BYTES, MAX_KEYS, MAX_NAMES
from tests.integration.test_strangers import server_address

WORKERS, CONNECTIONS = 18, 600
GROWTH_BYTES = 64 * 2**20
#: Each connection has a thread, and perhaps one that sends.
THREADS = 2 * Bounds.of_job(WORKERS + 1).of_a_host + 8
END_S = 60.0

pytestmark = pytest.mark.timeout(400)


# ---- workers ---------------------------------------------------------------------------------------------------------


def train() -> list[float]:
    """Train a round now, and one whenever asked to."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init("w", torch.zeros(100_000))
    found = []
    for _ in range(3):
        value = torch.ones(100_000)
        store.pushpull("w", value)
        found.append(value[0].item())
        tell(found[-1])
        listen(300)
    return found


def attack_as_member() -> dict[str, Any]:
    """Train as the others do; between the rounds, do as a member what must not cost much memory."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init("w", torch.zeros(100_000))
    session, found = store.session, {}
    value = torch.ones(100_000)

    def refusal(server: int, body: m.Request) -> str:
        with pytest.raises(PacelineError) as caught:
            session.call_server(server, body, "an attack")
        return str(caught.value)

    for turn in range(3):
        store.pushpull("w", torch.ones(100_000), out=value)
        tell(value[0].item())
        listen(300)
        if turn == 1:
            names = [f"{name}" for name in range(20)]
            session.call_server(0, m.UseBoard("set", names[:10], [bytes(2**20)] * 10), "setting")
            found["names"] = refusal(0, m.UseBoard("get", names[:10] * 50, []))
            many = [f"{name:03}" for name in range(MAX_NAMES)]
            for _ in range(MAX_BOARD_WAITS):
                session.ask_server(0, m.UseBoard("get", many, []), "waiting")
            found["waits"] = refusal(0, m.UseBoard("get", many, []))
            found["too many names"] = refusal(0, m.UseBoard("get", [*many, "one more"], []))
            keys: list[int | str] = [f"{key:04}" for key in range(MAX_KEYS)]
            session.ask_scheduler(m.Lookup("none", keys), "waiting")
            with pytest.raises(PacelineError) as caught:
                session.call_scheduler(m.Lookup("none", ["another"]), "an attack")
            found["lookups"] = str(caught.value)
    return found


# ---- the attack ------------------------------------------------------------------------------------------------------


class Holder:
    """A process that attacks for as long as the ``with`` block takes."""

    def __init__(self, job: LocalJob, kind: str) -> None:
        places = [f"{name}={where.removeprefix('tcp://')}" for name, where in
                  (("scheduler", job.address), ("server 0", server_address(job)))]  # fmt: skip
        program = str(Path(__file__).with_name("holders.py"))
        self._command = [sys.executable, program, kind, str(CONNECTIONS), *places]
        self._env = {**os.environ, "PACELINE_JOB_KEY": job.job_key}

    def __enter__(self) -> Holder:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, env=self._env)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def cost(job: LocalJob) -> dict[str, tuple[int, int]]:
    """Return the memory and the threads of the job's roles."""
    roles = {"scheduler": job.scheduler, "server": job.servers[0]}
    return {name: (one.rss_bytes(), psutil.Process(one.pid).num_threads()) for name, one in roles.items()}


def settled(job: LocalJob, before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the cost once the connections of an attack are gone."""
    deadline = time.monotonic() + END_S
    while any(now[1] > before[name][1] + 2 * WORKERS for name, now in cost(job).items()):
        assert time.monotonic() < deadline, cost(job)
        threading.Event().wait(0.1)
    return cost(job)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with LocalJob(WORKERS, 1, unix_sockets=False, shared_memory=False, timeout_s=200) as job:
        workers = [job.start(rank, train) for rank in range(WORKERS // 2)]

        def all_go_on() -> list[float]:
            for worker in workers:
                worker.tell("go on")
            return [worker.heard(200) for worker in workers]

        alone = cost(job)
        with Holder(job, "all"):
            workers += [job.start(rank, train) for rank in range(WORKERS // 2, WORKERS - 1)]
            workers.append(job.start(WORKERS - 1, attack_as_member))
            rounds = [[worker.heard(200) for worker in workers]]
        costs = {"before": settled(job, alone)}
        with Holder(job, "all"):
            rounds.append(all_go_on())
            costs["during"] = cost(job)
        costs["after"] = settled(job, alone)
        rounds.append(all_go_on())
        costs["as member"] = cost(job)
        for worker in workers:
            worker.tell("go on")
        results = [worker.result() for worker in workers]
    return {"costs": costs, "rounds": rounds, "as member": results[-1]}


def test_rounds_go_on_while_a_holder_of_the_key_attacks(found: dict[str, Any]) -> None:
    assert found["rounds"] == [[float(turn * WORKERS)] * WORKERS for turn in (1, 2, 3)]


def test_who_has_claimed_nothing_fills_no_memory_and_takes_few_threads(found: dict[str, Any]) -> None:
    costs = found["costs"]
    for name, (memory, threads) in costs["before"].items():
        assert costs["during"][name][0] - memory < GROWTH_BYTES, costs
        assert costs["during"][name][1] - threads < THREADS, costs
        assert costs["after"][name][0] - memory < GROWTH_BYTES, costs


def test_a_member_fills_no_memory_and_is_told_the_bounds(found: dict[str, Any]) -> None:
    told, costs = found["as member"], found["costs"]
    assert f"at most {MAX_GATHER_BYTES} are possible" in told["names"]
    assert f"{MAX_BOARD_WAITS} requests of worker {WORKERS - 1} wait" in told["waits"]
    assert "<= 4096" in told["too many names"]
    assert f"those of {MAX_KEYS} wait" in told["lookups"]
    assert all(costs["as member"][name][0] - costs["after"][name][0] < GROWTH_BYTES for name in costs["after"]), costs
