"""``paceline up`` over hosts with real ssh servers: unlike ones, absent ones, and one that is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.ssh import SshHosts, why_no_ssh
from tests.engines.slow import quota, why_no_quota
from tests.engines.small_jobs import wait_until_clean

WHY_NOT = why_no_quota() or why_no_ssh()

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible"),
    pytest.mark.timeout(300),
]

#: The part of a CPU that each host's worker gets, and the rate of its link: half of two cores, so that nobody waits for
#: a core beyond its own quota.
CPUS, MBITS = (0.4, 0.3, 0.3, 0.05), (100, 100, 40, 40)
#: Seconds that a step computes on a whole core.
COMPUTE_S = 0.04
STEPS, BATCH = 40, 16
#: How far a plan may be from the job, both ways.
AIM = 0.1

#: The worker gets its part of a CPU when it has started: long imports say nothing about steps.
TRAIN = f"""
import os, socket, sys, time, torch
import paceline

store = paceline.kvstore.create("dist_sync")
model = torch.nn.Linear(50_000, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), kvstore=store, model=model)
batch = torch.ones({BATCH}, 50_000)
rank = int(socket.gethostname()[1:])
with open(os.path.join(os.environ["QUOTAS"], str(rank))) as file:
    group = file.read()
with open(group, "w") as procs:
    procs.write("0")
for step in range({STEPS}):
    if step == 5:
        began = time.monotonic()
    optimizer.zero_grad()
    until = time.thread_time() + {COMPUTE_S}
    while time.thread_time() < until:
        pass
    model(batch).mean().backward()
    optimizer.step()
took = time.monotonic() - began
if store.rank == 0:
    print("RATE", {BATCH} * store.num_workers * {STEPS - 5} / took, flush=True)
store.close()
"""


def command(hosts: SshHosts, words: Sequence[str]) -> list[str]:
    """Return a command that starts ``paceline up`` on the first host."""
    up = [sys.executable, "-m", "paceline", "up", "-o", f"ssh=ssh -F {hosts.client_config}"]
    return hosts.command([*up, "--start-timeout", "120", *words])


def environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def run(hosts: SshHosts, folder: Path, words: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(hosts, words), cwd=folder, env=environ() | env, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip


@contextlib.contextmanager
def quotas(folder: Path) -> Iterator[None]:
    """Make a group of processes for each host; its worker joins it."""
    with contextlib.ExitStack() as stack:
        for rank, cpus in enumerate(CPUS):
            keeper = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
            stack.callback(keeper.communicate)
            group = stack.enter_context(quota(keeper.pid, cpus))
            (folder / str(rank)).write_text(str(group.folder / "cgroup.procs"))
        yield


@pytest.mark.slow
def test_plan_is_what_the_job_then_does_and_leaves_out_a_host_that_slows_it_down(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with SshHosts(4) as hosts, quotas(tmp_path):
        for rank, mbits in enumerate(MBITS):
            hosts[rank].run(f"tc qdisc add dev eth0 root tbf rate {mbits}mbit burst 64kb latency 50ms")
        words = ["-H", "h0,h1,h2,h3", "--env", "QUOTAS", "--json", "--yes", "--", sys.executable, "train.py"]
        done = run(hosts, tmp_path, words, QUOTAS=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        for rank in range(4):
            wait_until_clean(lambda rank=rank: hosts.processes(rank))
    plan = json.loads(done.stdout.splitlines()[0])
    assert [one["host"] for one in plan["measured"] if one["left_out"]] == ["h3"], done.stderr
    assert "h3 left out: the job is as fast or faster without it" in done.stderr
    links = {one["host"]: one["link_bytes_per_s"] for one in plan["measured"]}
    assert 10e6 < links["h0"] < 13e6
    assert 4e6 < links["h2"] < 6e6
    found = re.search(r"RATE (\S+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    ratio = plan["plan"]["samples_per_s"] / float(found[1])
    print(f"planned {plan['plan']['samples_per_s']:.4g}, ran at {float(found[1]):.4g}: {ratio:.3f}\n{done.stderr}")
    assert abs(ratio - 1) < AIM, done.stderr


def test_host_that_does_not_answer_and_one_that_is_unknown_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with SshHosts(2) as hosts:
        hosts.kill(1)
        done = run(hosts, tmp_path, ["-H", "h0,h1,nowhere", "--yes", "--", sys.executable, "train.py"])
        assert done.returncode == 2, done.stdout + done.stderr
        assert "hosts: 1 of 3 can be used" in done.stdout
        assert "h1: host h1 has no ssh server at that port" in done.stdout
        assert "nowhere: host nowhere is unknown" in done.stdout
        assert "not without h1, nowhere" in done.stdout
        wait_until_clean(lambda: hosts.processes(0))


def test_interrupt_while_it_measures_leaves_nothing_on_any_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('began', file=open('began', 'w')); import time; time.sleep(600)\n")
    with SshHosts(2) as hosts:
        words = ["-H", "h0,h1", "--", sys.executable, "train.py"]
        with subprocess.Popen(
            command(hosts, words), cwd=tmp_path, env=environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            text=True,
        ) as up:  # fmt: skip
            assert up.stdout is not None
            for line in up.stdout:
                if line.startswith("measuring 20 rounds"):
                    break
            while not (tmp_path / "began").exists():
                assert up.poll() is None
            up.send_signal(signal.SIGINT)
            assert "nothing of it is left running" in up.stdout.read()
        assert up.returncode == 130
        for rank in range(2):
            wait_until_clean(lambda rank=rank: hosts.processes(rank))
