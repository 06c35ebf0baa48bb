"""Systems without Linux's own calls, where all members talk over TCP and share no memory; and workers on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import programs

ELSEWHERE, WINDOWS = (Path(__file__).parent / name for name in ("elsewhere", "windows"))
SCRIPT = """
import os, sys, torch, paceline
assert not hasattr(os, "memfd_create")
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
store = paceline.kvstore.create("dist_sync")
sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
optimizer = paceline.DistributedOptimizer(sgd, kvstore=store, model=net)
for step in range(5):
    net(torch.full((8, 4), 1.0 + step + store.rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
before = net.weight.sum().item()
paceline.save(sys.argv[1], net, optimizer, step=5)
paceline.load(sys.argv[1], net, optimizer)
assert net.weight.sum().item() == before
print("weights", before)
"""


@pytest.mark.timeout(600)  # on a busy machine; seconds on an idle one
def test_job_trains_and_saves_without_what_only_linux_has(tmp_path: Path) -> None:
    path = f"{ELSEWHERE}:{os.environ.get('PYTHONPATH', '')}"
    found = subprocess.run(
        [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "1", "--",
         sys.executable, "-c", SCRIPT, str(tmp_path / "job.ckpt")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    weights = {line.split("weights ")[1] for line in found.stdout.splitlines() if "weights" in line}
    assert len(weights) == 1, found.stdout


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, timeout=580, check=False)


@pytest.mark.timeout(600)
def test_worker_trains_and_saves_with_what_windows_has(tmp_path: Path) -> None:
    """Its scheduler and server run on a whole system, and are forked."""
    inside = ("env", f"PYTHONPATH={WINDOWS}", sys.executable, "-c", SCRIPT, str(tmp_path / "job.ckpt"))
    found = programs.run(["-m", "paceline", "launch", "-n", "2", "-s", "1", "--", *inside], timeout_s=580)
    assert found.returncode == 0, found.stderr
    weights = {line.split("weights ")[1] for line in found.stdout.splitlines() if "weights" in line}
    assert len(weights) == 1, found.stdout


@pytest.mark.timeout(600)
def test_job_that_is_launched_on_windows_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    launch = (sys.executable, "-m", "paceline", "launch", "-n", "1", "--", sys.executable, str(tmp_path / "train.py"))
    found = run(*launch, PYTHONPATH=str(WINDOWS))
    assert found.returncode == 1
    assert found.stderr.startswith("paceline launch: Windows has no ")
    assert "Only workers run on Windows itself" in found.stderr
    assert found.stderr.count("\n") == 1
