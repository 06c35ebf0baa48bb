"""Scripts that the tests of launchers run as workers, and what they look for afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

#: Far more than anything here takes.
DEADLINE_S = 90.0
#: After which nothing may run on any host.
CLEAN_S = 5.0

TRAIN = """
import contextlib, os, socket, torch
from pathlib import Path
from paceline import kvstore

store = kvstore.create("dist_sync")
store.init(0, torch.zeros(2))
store.push(0, torch.full((2,), store.rank + 1.0))
store.pull(0, out := torch.zeros(2))
print(store.rank, store.num_workers, out.tolist(), socket.gethostname())
key = os.environ["PACELINE_JOB_KEY"].encode()
lines = []
for process in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
        lines.append((process / "cmdline").read_bytes())
assert any(b"paceline" in line for line in lines)
print("key shown" if any(key in line for line in lines) else "key hidden")
"""


def write_training(folder: Path) -> str:
    """Write the training script; return its path."""
    path = folder / "train.py"
    path.write_text(TRAIN)
    return str(path)


def start(argv: Sequence[str], folder: Path, environ: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    """Start a launcher in a folder."""
    return subprocess.Popen(
        argv,
        cwd=folder,
        env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained(out: str, hosts: Iterable[str]) -> bool:
    """Tell whether the training script of a job of one worker per host printed what it must."""
    wanted = {
        f"[worker {rank}] {rank} {count} {[3.0, 3.0] if count == 2 else [1.0, 1.0]} {host}"
        for count in [len(list(hosts))]
        for rank, host in enumerate(hosts)
    }
    lines = set(out.splitlines())
    return wanted <= lines and "key shown" not in out and "key hidden" in out


def wait_until_clean(processes: Callable[[], list[str]]) -> None:
    """Wait until nothing runs any more."""
    until = time.monotonic() + CLEAN_S
    while left := processes():
        assert time.monotonic() < until, left
        time.sleep(0.05)
