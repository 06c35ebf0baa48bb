"""A whole job of ``paceline launch --groups auto``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import time
import torch
import paceline

store = paceline.kvstore.create("dist_gsync")
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
for _ in range(60 if store.session.settings.profile else 3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.01 if store.rank == 1 else 0.1)
    optimizer.step()
print("trained in groups", store.policy.groups)
"""


def test_workers_are_measured_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "-n", "2", "-s", "1", "--groups", "auto", "--", sys.executable, "train.py"]
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained in groups") == 2
    groups = done.stdout.rpartition("trained in groups ")[2].strip()
    assert groups == "((1,), (0,))"
