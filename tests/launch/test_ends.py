"""A job of ``paceline launch`` that ends well, but whose workers have not done the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import time, torch
from paceline import kvstore

store = kvstore.create("dist_sync")
store.set_optimizer("add")
store.init("w", torch.zeros(2))
for step in range(6):
    if store.rank == 1 and step == 2:
        break
    store.push("w", torch.ones(2))
    store.pull("w", torch.zeros(2))
    time.sleep(0.5)  # the time that others go on
"""


def test_worker_that_leaves_its_loop_early_is_named_then_and_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    argv = ["launch", "-n", "2", "-s", "1", "--", sys.executable, str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *argv], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = [line for line in done.stderr.splitlines() if "worker 1" in line]
    assert "worker 1 on " in first
    assert "left the job after round 2; the others train on without it (worker 0 is in round " in first
    assert last.endswith("not all workers have trained as many rounds: 6 by worker 0; 2 by worker 1")
