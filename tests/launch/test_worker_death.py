"""Jobs of ``paceline launch`` in which a worker is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.exitcodes import WORKER_LOST

SCRIPT = """
import os, signal, sys, torch
from paceline import kvstore

store = kvstore.create(sys.argv[1])
store.set_optimizer("add")
store.init("w", torch.zeros(2))
store.push("w", torch.ones(2))
store.pull("w", torch.zeros(2))
if store.rank == 1:
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
store.barrier()
store.pull("w", out := torch.zeros(2))
print("the end", out.tolist())
"""


@pytest.mark.parametrize(
    ("kind", "options", "code", "says"),
    [
        ("dist_async", [], WORKER_LOST, "worker 1 died"),
        ("dist_sync", ["--on-worker-death", "continue"], WORKER_LOST, "worker 1 died"),
        ("dist_async", ["--on-worker-death", "stop"], 137, "worker 1 failed"),
    ],
)
def test_others_go_on_and_the_end_says_who_died(
    tmp_path: Path, kind: str, options: list[str], code: int, says: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    argv = ["launch", "-n", "3", "-s", "1", *options, "--", sys.executable, str(script), kind]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *argv], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(says)]
    assert "killed by SIGKILL" in line
    assert "about to die" in done.stderr
    assert done.stdout.count("the end [3.0, 3.0]") == (2 if code == WORKER_LOST else 0)
