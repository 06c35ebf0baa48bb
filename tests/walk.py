"""How many functions and files one steady step of one bucket enters, and how many threads hand it on.

``python -m tests.walk`` trains a net of one bucket with one worker and one server, each in a process of its own. It
records every Python function of paceline that runs between ``backward()`` and the new weights, with updates in the
worker and on the server, with shared memory and over TCP. It prints a table and one JSON line.

- *functions, files*: distinct ones, over five steps. Comprehensions and lambdas count as functions.
- *hand-offs*: how often another thread of the same process goes on with the message, in the step with the fewest. A
  thread that wakes another one and still runs for a moment is no hand-off, so a change of threads back to one that has
  been left counts only if something happened in the other process in between, or the thread waits for the result.

The threads of the lifeline and of the host's figures are left out: they run beside the steps.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import mmap
import os
import runpy
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

import paceline
from paceline.testing import LocalJob

#: Steps before the first that is recorded, and steps that are recorded: after connections have been lent, and between
#: two steps after which weights are compared (16 and 32, later every 512th).
WARM_UP, RECORDED = 24, 5

#: Elements of the only bucket: 256 KiB, so that its frame is a large one.
WIDTH = 65_536

_SOURCES = str(Path(paceline.__file__).parent)
#: Words in the names of threads that run beside the steps.
_BESIDE = ("lifeline", "stops")

_CONTROL, _OUTPUT = "WALK_CONTROL", "WALK_OUTPUT"


class Recorder:
    """Records the functions of paceline that this process enters while a byte of a shared file is not 0."""

    def __init__(self, control: str, output: str) -> None:
        with open(control, "r+b") as file:
            self.control = mmap.mmap(file.fileno(), 1)
        self._output = output
        self._entered: list[tuple[int, float, str, str, str]] = []
        threading.setprofile(self._entering)
        sys.setprofile(self._entering)
        atexit.register(self._write)

    def _entering(self, frame: FrameType, event: str, _: Any) -> None:
        step = self.control[0]
        if step == 0 or event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(_SOURCES):
            return
        thread = threading.current_thread().name
        if not any(one in thread for one in _BESIDE):
            name = f"{code.co_qualname}:{code.co_firstlineno}"
            self._entered.append((step, time.monotonic(), thread, code.co_filename[len(_SOURCES) + 1 :], name))

    def _write(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        Path(self._output, f"{os.getpid()}.json").write_text(json.dumps([os.environ["PACELINE_ROLE"], self._entered]))


def train(update: str) -> None:
    """Train in a worker, and record the last steps."""
    import torch

    recorder = Recorder(os.environ[_CONTROL], os.environ[_OUTPUT])
    torch.manual_seed(0)
    net = torch.nn.Linear(WIDTH, 1, bias=False)
    store = paceline.kvstore.create("dist_sync")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped = paceline.DistributedOptimizer(optimizer, kvstore=store, model=net, update=update)
    batch = torch.ones(4, WIDTH)
    for step in range(WARM_UP + RECORDED):
        loss = net(batch).mean()
        recorder.control[0] = max(0, step + 1 - WARM_UP)
        loss.backward()
        wrapped.step()
        net.weight.sum().item()  # with update="server" the new weights are waited for here
        recorder.control[0] = 0
        wrapped.zero_grad()
    store.close()


class _Job(LocalJob):
    """A job whose server records itself, too."""

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-m", "tests.walk", "--member", role] if role == "server" else argv

    def _fork_server(self) -> None:
        """Return none: a forked server would run without its recorder."""


def walk(update: str, shared: bool) -> list[tuple[str, list[list[Any]]]]:
    """Train in one kind of job, and return what each process has recorded."""
    with tempfile.TemporaryDirectory() as directory:
        control = Path(directory, "control")
        control.write_bytes(b"\0")
        environment = {_CONTROL: str(control), _OUTPUT: directory}
        settings = {} if shared else {"shared_memory": False, "unix_sockets": False}
        with _Job(1, 1, environment=environment, check_rules=False, **settings) as job:
            job.run(train, update)
            job.servers[0].wait(30.0)
        return sorted((json.loads(path.read_text()) for path in Path(directory).glob("*.json")), reverse=True)


def figures(records: Sequence[tuple[str, Sequence[Sequence[Any]]]]) -> dict[str, Any]:
    """Count what the processes of a job have recorded."""
    entered = {role: {(file, name) for _, _, _, file, name in calls} for role, calls in records}
    both = set().union(*entered.values())
    return {
        "functions": len(both),
        "files": len({file for file, _ in both}),
        **{f"{role} functions": len(names) for role, names in entered.items()},
        **{f"{role} files": len({file for file, _ in names}) for role, names in entered.items()},
        "hand-offs": min(hand_offs(records, step) for step in range(1, RECORDED + 1)),
    }


def listed(records: Sequence[tuple[str, Sequence[Sequence[Any]]]]) -> list[str]:
    """List the functions in the order in which each process first enters them, with its calls per step."""
    lines = []
    for role, calls in records:
        counts = Counter((file, name) for _, _, _, file, name in calls)
        lines += [f"  {role:7} {count / RECORDED:6.1f}  {file} {name}" for (file, name), count in counts.items()]
    return lines


def hand_offs(records: Sequence[tuple[str, Sequence[Sequence[Any]]]], step: int) -> int:
    """Return how often a thread of the same process goes on with what another one has begun, in one step.

    The threads of each process are taken in the order in which they first run after the other process did something.
    """
    calls = sorted((at, role, thread) for role, rows in records for one, at, thread, _, _ in rows if one == step)
    count = 0
    last = {role: "" for role, _ in records}
    seen: set[tuple[str, str]] = set()
    previous = ""
    for _, role, thread in calls:
        if role != previous:
            seen = set()  # a message has crossed to the other process, or an answer has come back
        if thread != last[role] and (role, thread) not in seen:
            count += last[role] != ""
            last[role] = thread
        seen.add((role, thread))
        previous = role
    return count


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="also list the functions, in the order of their first call")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member:
        Recorder(os.environ[_CONTROL], os.environ[_OUTPUT])
        sys.argv = ["paceline", arguments.member]
        runpy.run_module("paceline", run_name="__main__", alter_sys=True)
        return 0
    rows = {}
    for shared, update in itertools.product((True, False), ("worker", "server")):
        records = walk(update, shared)
        kind = f'{"shared memory" if shared else "TCP"}, update="{update}"'
        rows[kind] = figures(records)
        if arguments.list:
            print(f"{kind}: calls per step, and the function", *listed(records), sep="\n")
    columns = list(next(iter(rows.values())))
    table = Table("one step of one bucket", *columns)
    for name, row in rows.items():
        table.add_row(name, *(str(row[column]) for column in columns))
    Console(width=160).print(table)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
