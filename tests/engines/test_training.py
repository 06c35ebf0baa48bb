"""Whole trainings through launchers: bit-equal to one host, and the command lines of MXNet's documentation."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import paceline
from tests.clusters.ssh import SshHosts, why_no_ssh

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh())]

PACKAGE = Path(paceline.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 170.0

TRAIN = """
import sys, torch
from paceline import DistributedOptimizer, kvstore

torch.manual_seed(0)
store = kvstore.create("dist_sync")
model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = DistributedOptimizer(sgd, kvstore=store, model=model)
data = torch.Generator().manual_seed(store.rank)
for _ in range(12):
    x = torch.randn(16, 20, generator=data)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if store.rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.fixture(scope="module")
def copies() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="paceline-copies-", dir="/var/tmp") as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(copies: str) -> Iterator[SshHosts]:
    """Four hosts; h3 is behind a slow link. A program ``ssh`` stands before the real one: the user's configuration."""
    with SshHosts(4, hidden={index: [copies] for index in range(4)}) as made:
        made[3].run("tc qdisc add dev eth0 root tbf rate 80mbit burst 64kb latency 50ms")
        (made.folder / "bin").mkdir()
        program = made.folder / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {made.client_config} "$@"\n')
        program.chmod(0o755)
        (made.folder / "bin" / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
        (made.folder / "bin" / "paceline").chmod(0o755)
        (made.folder / "bin" / "python").symlink_to(sys.executable)
        yield made


def run(cluster: SshHosts, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{cluster.folder}/bin:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = cluster.command(["env", f"PATH={path}", *words])
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.slow
def test_four_hosts_train_bit_equal_to_one(cluster: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    hosts = cluster.hostfile(["h0", "h1", "h2", "h3"])
    for name, where in (("one", []), ("four", ["-H", hosts])):
        words = ["paceline", "launch", "-n", "4", "-s", "2", *where, "--", sys.executable, "train.py", f"{name}.pt"]
        done = run(cluster, words, tmp_path)
        assert done.returncode == 0, done.stderr
    one, four = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("one", "four"))
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)


SEEDS = [
    "paceline launch -n 2 --launcher ssh -H hosts python train_mnist.py --network mlp --kv-store dist_sync",
    "paceline launch -n 2 --launcher ssh -H hosts python train_mnist.py --network mlp --kv-store dist_sync "
    "--gc-type 2bit",
    "export DMLC_INTERFACE=eth0; paceline launch -n 2 -H hosts python train_mnist.py --network mlp "
    "--kv-store dist_sync",
    "export PS_VERBOSE=1; paceline launch -n 2 -H hosts python train_mnist.py --network mlp --kv-store dist_sync",
    "paceline launch -n 2 -s 2 -i eth0 --launcher ssh -H hosts --groups groups python train_mnist.py --network mlp "
    "--kv-store dist_gsync --staleness 2",
]


def in_examples(folder: Path, cluster: SshHosts) -> Path:
    """Copy the examples beside a file of hosts, as the documentation has it."""
    here = folder / "examples"
    shutil.copytree(EXAMPLES, here, ignore=shutil.ignore_patterns("__pycache__"))
    (here / "hosts").write_text("h1\nh2\n")
    (here / "groups").write_text(f"{cluster[1].address}\n{cluster[2].address}\n")
    return here


@pytest.mark.slow
@pytest.mark.parametrize("line", SEEDS)
def test_command_lines_of_mxnet_work_as_written(cluster: SshHosts, tmp_path: Path, line: str) -> None:
    done = run(cluster, ["sh", "-c", f"{line} --num-epochs 1"], in_examples(tmp_path, cluster))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Trained mlp" in done.stdout
    assert ("connecting to" in done.stderr) == ("PS_VERBOSE" in line)


@pytest.mark.slow
def test_directory_is_synchronised_as_mxnet_has_it(cluster: SshHosts, tmp_path: Path, copies: str) -> None:
    here = in_examples(tmp_path, cluster)
    shutil.copytree(PACKAGE, here / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    line = (
        f"paceline launch -n 2 -H hosts --sync-dst-dir {copies}/mxnet "
        "python train_mnist.py --network mlp --kv-store dist_sync --num-epochs 1"
    )
    done = run(cluster, shlex.split(line), here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Trained mlp" in done.stdout


GROUPED = """
import os, sys, torch
from paceline import kvstore

store = kvstore.create("dist_gsync", staleness=4)
store.set_optimizer("sgd", lr=0.1)
store.init(0, torch.zeros(4))
for _ in range(6):
    store.push(0, torch.ones(4))
    store.pull(0, torch.zeros(4))
print(os.environ["PACELINE_WORKER_GROUP"], store.rank, store.policy.groups, sys.argv[1:])
"""


@pytest.mark.slow
def test_two_groups_train_from_one_command(cluster: SshHosts, tmp_path: Path) -> None:
    """The second group is behind a slow link."""
    (tmp_path / "train.py").write_text(GROUPED)
    groups = ["--group", "new: n=2, hosts=h1,h2, args=--batch-size 64", "--group", "old: n=1, hosts=h3, weight=0.5"]
    words = ["paceline", "launch", *groups, "--launcher", "ssh", "-s", "1", "--", sys.executable, "train.py"]
    done = run(cluster, words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[worker 0] new 0 ((0, 1), (2,)) ['--batch-size', '64']",
        "[worker 1] new 1 ((0, 1), (2,)) ['--batch-size', '64']",
        "[worker 2] old 2 ((0, 1), (2,)) []",
    ]
