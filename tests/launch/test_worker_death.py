"""A job of ``paceline launch`` in which a worker is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.exitcodes import WORKER_LOST

SCRIPT = """
import os, signal, torch
from paceline import kvstore

store = kvstore.create("dist_async")
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


def test_others_go_on_and_the_end_says_who_died(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    argv = ["launch", "-n", "2", "-s", "1", "--", sys.executable, str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *argv], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == WORKER_LOST, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("worker 1 died")]
    assert "and the others went on: killed by SIGKILL (exit code 137)" in line
    assert "about to die" in done.stderr
    assert "the end [2.0, 2.0]" in done.stdout
