"""Systems without Linux's own calls, where all members talk over TCP and share no memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = Path(__file__).parent / "elsewhere"
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


def test_windows_is_told_of_wsl() -> None:
    program = "import sys; sys.platform = 'win32'; import paceline"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "ImportError: paceline runs on Linux and on macOS. On Windows, install and run it in WSL 2" in found.stderr
