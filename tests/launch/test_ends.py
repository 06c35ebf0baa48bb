"""The end of a job of ``paceline launch`` whose workers have not all done the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.host.exitcodes import WORKER_LOST
from tests.clusters import programs

LEAVES_EARLY = """
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

DIES = """
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


def launched(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script in two workers to its end."""
    script = folder / "train.py"
    script.write_text(text)
    words = ["-m", "paceline", "launch", "-n", "2", "-s", "1", "--quiet", "--", sys.executable, script]
    return programs.run(words)


def test_worker_that_leaves_its_loop_early_is_named_then_and_at_the_end(tmp_path: Path) -> None:
    done = launched(tmp_path, LEAVES_EARLY)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = [line for line in done.stderr.splitlines() if "worker 1" in line]
    assert "worker 1 on " in first
    assert "left the job after round 2; the others train on without it (worker 0 is in round " in first
    assert last.endswith("not all workers have trained as many rounds: 6 by worker 0; 2 by worker 1")


def test_others_go_on_without_a_killed_worker_and_the_end_says_who_died(tmp_path: Path) -> None:
    done = launched(tmp_path, DIES)
    assert done.returncode == WORKER_LOST, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("worker 1 died")]
    assert "and the others went on: killed by SIGKILL (exit code 137)" in line
    assert "about to die" in done.stderr
    assert "the end [2.0, 2.0]" in done.stdout
