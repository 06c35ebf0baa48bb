"""Whole trainings through launchers: bit-equal to one host, and the command lines of MXNet's documentation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import paceline
from examples import make_data
from tests.clusters.ssh import SshHosts, why_no_ssh
from tests.docs.pages import rows

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh())]

PACKAGE = Path(paceline.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 600.0

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
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
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


#: The command lines of the documents that docs/mxnet.md has, in its order, except those that start no training.
LINES = [row[1].strip("` ") for row in rows("docs/mxnet.md", "## Command lines")]
TRAININGS = [line for line in LINES if re.search(r"python [^-]|[.]sh$", line)]
#: What is different on two hosts without GPUs, and for a training of seconds.
FEW = [
    (r"-n \d+ -s \d+", "-n 2 -s 2"),
    (r"-np 16 -H \S+", "-np 2 -H localhost:2"),
    (r"-i eth1", "-i eth0"),
    (r"--gpus? \S+", "--cpus 2"),
    (r"--model-load-epoch 250", "--model-load-epoch 1"),
]
FLAGS = {
    "mxnet_mnist.py": "--epochs 1",
    "mxnet_imagenet_resnet50.py": "--network resnet --num-layers 20 --image-shape 3,32,32 --batch-size 8",
    "train_mnist.py": "--num-examples 320",
    "train_cifar10.py": "--batch-size 8",
    "train_cifar100.py": "--batch-size 8 --network 3conv",
    "gsp_cifar10_inception_small.sh": "--batch-size 8 --cpus 1",
}


def short(line: str, copies: str) -> str:
    """Return a line for two hosts and some seconds."""
    for there, here in FEW:
        line = re.sub(there, here, line)
    script = next(name for name in FLAGS if name in line)
    epochs = 2 if "--model-load-epoch" in line else 1
    few = "" if script == "mxnet_mnist.py" else f"--num-epochs {epochs}"
    samples = "" if script in ("mxnet_mnist.py", "train_mnist.py") else "--num-examples 32"
    return f"{line} {FLAGS[script]} {few} {samples}".replace("/tmp/mxnet", f"{copies}/mxnet")


@pytest.fixture(scope="module")
def folder(cluster: SshHosts) -> Path:
    """Return a copy of the examples beside the files that the documents have: hosts, groups, parts, data, and MXNet."""
    here = cluster.folder / "examples"
    shutil.copytree(EXAMPLES, here, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE, here / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    (here / "hosts").write_text("h1\nh2\n")
    (here / "groups").write_text(f"{cluster[1].address}\n{cluster[2].address}\n")
    (here / "data_sharding").write_text("0 0.3\n0.3 1\n")
    for name in ("cifar10", "cifar100", "imagenet"):
        (here / name).mkdir()
        make_data.MAKERS[name](here / name)
    (here / "data").symlink_to(here)
    return here


@pytest.mark.slow
@pytest.mark.parametrize("line", TRAININGS)
def test_command_line_of_a_document_trains(cluster: SshHosts, folder: Path, copies: str, line: str) -> None:
    lines = [short(line, copies)]
    if "--retrain" in line:  # what it goes on from
        lines.insert(0, short(line.replace("--model-load-epoch 250 --retrain ", ""), copies))
    for typed in lines:
        done = run(cluster, ["bash", "-c", typed], folder)
        assert done.returncode == 0, f"{typed}\n{done.stdout}{done.stderr}"
        assert re.search(r"epoch \d: .*accuracy [0-9.]+", done.stdout), done.stdout
    assert ("goes on after epoch 1" in done.stdout) == ("--retrain" in line)
    assert ("connecting to" in done.stderr) == ("PS_VERBOSE" in line)


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
