"""Two worker groups from one command: one with half a CPU, one behind a slow link, on engines that can hold both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.clusters.slurm import SlurmCluster, why_no_slurm
from tests.clusters.ssh import SshHosts, why_no_ssh
from tests.engines.named_hosts import NamedHosts
from tests.engines.ray_nodes import RayNodes
from tests.engines.slow import Quota, quota, why_no_quota

VENV = Path(os.environ.get("PACELINE_TEST_ENGINES_VENV", "/nowhere"))
WHY_NOT = why_no_quota() or why_no_ssh()

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible"),
    pytest.mark.timeout(400),
]

JOB_S = 300.0
ROUNDS, ELEMENTS = 5, 250_000
BITS_S = 80e6
#: What the token bucket lets through at once.
BURST_BYTES = 64 * 1024
LIMIT = "tc qdisc add dev eth0 root tbf rate 80mbit burst 64kb latency 50ms"

TRAIN = f"""
import os, time, torch
from paceline import kvstore

store = kvstore.create("dist_gsync", staleness=4)
store.set_optimizer("sgd", lr=0.1)
store.init(0, torch.zeros({ELEMENTS}))
store.pull(0, value := torch.zeros({ELEMENTS}))
store.barrier()
began = time.monotonic()
for _ in range({ROUNDS}):
    cpu = time.process_time()
    while time.process_time() < cpu + 0.2:
        pass
    store.push(0, torch.ones({ELEMENTS}))
    store.pull(0, value)
took = time.monotonic() - began
store.barrier()
store.pull(0, value)
print(os.environ["PACELINE_WORKER_GROUP"], store.rank, store.policy.groups, f"{{took:.2f}} s,", f"{{value[0]:.2f}}")
"""

Launch = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def check(launch: Launch, folder: Path, slow: Quota, groups: Sequence[str]) -> None:
    """Train with a group of two workers with half a CPU, and one of one worker behind the slow link."""
    (folder / "train.py").write_text(TRAIN)
    words = ["-s", "1", "--start-timeout", "240", "--env", "OMP_NUM_THREADS=1"]  # half a CPU imports torch three times
    done = launch([*groups, *words, "--", sys.executable, str(folder / "train.py")])
    assert done.returncode == 0, done.stdout + done.stderr
    form = r"\[worker (\d)\] (\w+) \1 \(\(0, 1\), \(2,\)\) (\S+) s, (\S+)"
    found = re.findall(form, done.stdout)
    print(found)
    assert sorted((rank, group) for rank, group, _, _ in found) == [("0", "cpu"), ("1", "cpu"), ("2", "net")], (
        done.stdout
    )
    value = {rank: float(text) for rank, _, _, text in found}
    assert value["0"] == value["1"]  # a group reads one version
    assert all(-0.1 * 3 * ROUNDS <= one < 0 for one in value.values())  # a push is added up within its group
    took = {rank: float(seconds) for rank, _, seconds, _ in found}
    assert slow.throttled > 0
    assert took["0"] >= ROUNDS * 0.2 * 2 / 0.5 * 0.8  # two workers share half a CPU
    assert took["2"] >= (ROUNDS * ELEMENTS * 4 - BURST_BYTES) * 8 / BITS_S


def run(command: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=env | {"PYTHONPATH": os.pathsep.join(sys.path)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=JOB_S, check=False,
    )  # fmt: skip


LAUNCH = [sys.executable, "-m", "paceline", "launch", "--launcher"]


def test_ssh(tmp_path: Path) -> None:
    with SshHosts(3) as hosts, quota(hosts.daemon(1), 0.5) as slow:
        hosts[2].run(LIMIT)

        def launch(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
            command = [*LAUNCH, "ssh", "-o", f"ssh=ssh -F {hosts.client_config}", *words]
            return run(hosts.command(command), tmp_path, dict(os.environ))

        check(launch, tmp_path, slow, ["--group", "cpu: n=2, hosts=h1", "--group", "net: n=1, hosts=h2"])


@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "possible")
def test_slurm(tmp_path: Path) -> None:
    with SlurmCluster(2, {"first": [1], "second": [2]}) as slurm, quota(slurm.daemon(1), 0.5) as slow:
        slurm.hosts[2].run(LIMIT)

        def launch(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
            return run(slurm.command([*LAUNCH, "slurm", *words]), tmp_path, slurm.environ)

        groups = ["cpu: n=2, slots=2, select=partition=first", "net: n=1, select=partition=second"]
        check(launch, tmp_path, slow, [word for group in groups for word in ("--group", group)])


@pytest.mark.skipif(not (VENV / "bin" / "ray").exists(), reason="needs Ray (PACELINE_TEST_ENGINES_VENV)")
def test_ray(tmp_path: Path) -> None:
    labels = ({}, {"pace": "cpu"}, {"pace": "net"})
    ray, env = VENV / "bin" / "ray", {"PYTHONPATH": os.pathsep.join(sys.path)}
    with NamedHosts(3, tmp_path) as hosts, RayNodes(hosts, ray, tmp_path, labels, 3, env) as nodes:
        nodes.wait_for(3)
        hosts.limit("h3")

        def launch(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
            command = [str(VENV / "bin" / "python"), *LAUNCH[1:], "ray", "-o", f"address={nodes.address}", *words]
            return run(hosts.command("h1", command), tmp_path, dict(os.environ))

        groups = ["cpu: n=2, select=pace=cpu", "net: n=1, select=pace=net"]
        with quota(nodes.daemon("h2"), 0.5) as slow:
            check(launch, tmp_path, slow, [word for group in groups for word in ("--group", group)])
