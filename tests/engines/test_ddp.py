"""Scripts with DDP on two unlike hosts, with 3 processes and 1: the weights of torchrun with Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.clusters.ssh import SshHosts, why_no_ssh

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh())]

SCRIPTS = Path(__file__).parents[1] / "ddp" / "trainers"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SshHosts]:
    """h0 runs the launcher; h2 has an interface of another name."""
    with SshHosts(3) as made:
        for words in ("link set eth0 down", "link set eth0 name net7", "link set net7 up"):
            made[2].run(f"ip {words}")
        yield made


def weights(command: list[str], path: Path) -> dict[str, torch.Tensor]:
    """Train in float64; returns the weights."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("PACELINE_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*command, str(path), "--double"]
    for _ in range(2):
        done = subprocess.run(
            command, env=env, cwd=path.parent, check=False, capture_output=True, text=True, timeout=200
        )
        if "terminate called without an active exception" not in done.stdout + done.stderr:
            break
        assert "torch.distributed.run" in command, "a thread of Gloo's that its process did not join, and none of ours"
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(torch.load(path))


@pytest.mark.parametrize("name", ["mnist.py", "imagenet.py"])
def test_three_processes_and_one_have_the_weights_of_gloo(cluster: SshHosts, name: str, tmp_path: Path) -> None:
    hosts = cluster.hostfile(["h1 slots=3", "h2 slots=1"])
    launch = [sys.executable, "-m", "paceline", "launch", "--quiet", "--ddp", "-n", "4", "-H", hosts]
    launch += ["-o", f"ssh=ssh -F {cluster.client_config}", "--", sys.executable, str(SCRIPTS / name)]
    ours = weights(cluster.command(launch), tmp_path / "ours.pt")
    theirs = weights([*TORCHRUN, str(SCRIPTS / name)], tmp_path / "theirs.pt")
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
