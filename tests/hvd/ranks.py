"""Runs functions on several ranks, each a process of its own, as torchrun would start them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import paceline.hvd as hvd
from paceline.testing.worker import load_function
from tests.clusters.fork_server import ForkedProcess, common_server

_numbers = itertools.count()
#: Whether all jobs run (`nox -s hvd`), or those of `make test`.
LONG = bool(os.environ.get("PACELINE_TEST_HVD"))
TIMEOUT_S = 300.0 if LONG else 90.0


class Ranks:
    """Processes that run one function.

    Args:
        function: of the module level of a file; its arguments and result are JSON.
        size: number of ranks.
        arguments: of the function.
        environment: further variables; ``by_rank`` of each rank.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        by_rank: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:
        self.size = size
        self._temporary = tempfile.TemporaryDirectory(prefix="hvd-ranks-")  # removed with this object
        self._folder = Path(self._temporary.name)
        job = f"test-{os.getpid()}-{next(_numbers)}"
        base = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "HOROVOD_"))}
        base |= {"OMP_NUM_THREADS": "1", "PACELINE_JOB_ID": job}
        self.children: list[ForkedProcess] = []
        for rank in range(size):
            env = base | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            env |= {**(environment or {}), **by_rank(rank)}
            self.children.append(self._start(rank, function, list(arguments), env))

    def _start(
        self, rank: int, function: Callable[..., Any], arguments: list[Any], env: dict[str, str]
    ) -> ForkedProcess:
        task = self._folder / f"task-{rank}.json"
        content = {
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "arguments": arguments,
            "result": str(self._folder / f"result-{rank}.json"),
        }
        task.write_text(json.dumps(content))
        argv = [sys.executable, "-m", "paceline.testing.worker", str(task)]
        with (self._folder / f"output-{rank}").open("wb") as output, open(os.devnull, "wb") as register:
            return common_server().fork(argv, env, output.fileno(), register.fileno(), [])

    def output(self, rank: int) -> str:
        """Return what a rank has printed."""
        return (self._folder / f"output-{rank}").read_text()

    def result(self, rank: int) -> Any:
        """Return what the function returned on a rank that has ended."""
        return json.loads((self._folder / f"result-{rank}.json").read_text())

    def codes(self, timeout_s: float = TIMEOUT_S) -> list[int | None]:
        """Wait for the ends and return the exit codes; a rank that does not end in time is killed (None)."""
        deadline = time.monotonic() + timeout_s
        codes: list[int | None] = []
        for child in self.children:
            try:
                codes.append(child.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                codes.append(None)
        return codes

    def results(self) -> list[Any]:
        """Return what the function returned on each rank."""
        codes = self.codes()
        outputs = "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(self.size))
        assert codes == [0] * self.size, f"exit codes {codes}\n{outputs}"
        return [self.result(rank) for rank in range(self.size)]


def run(function: Callable[..., Any], size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Run a function on all ranks and return the results."""
    return Ranks(function, size, *arguments, **options).results()


#: A function, or a function and its arguments.
Call: TypeAlias = Callable[..., Any] | tuple[Any, ...]


def run_in_turn(size: int, *calls: Call, **options: Any) -> dict[str, list[Any]]:
    """Run functions of one file in the same processes; returns the results of all ranks, by name and arguments."""
    ranks, names = started_in_turn(size, *calls, **options)
    return {name: list(found) for name, *found in zip(names, *ranks.results(), strict=True)}


def started_in_turn(size: int, *calls: Call, **options: Any) -> tuple[Ranks, list[str]]:
    """Start functions of one file in the same processes, with ``hvd.shutdown()`` after each.

    Returns:
        The ranks, each of which prints a name before its call; and the names: of the functions with their arguments.
    """
    given = [call if isinstance(call, tuple) else (call,) for call in calls]
    listed = [[function.__name__, *arguments] for function, *arguments in given]
    ranks = Ranks(call_in_turn, size, given[0][0].__code__.co_filename, listed, **options)
    return ranks, [" ".join(map(str, one)) for one in listed]


def call_in_turn(file: str, calls: list[list[Any]]) -> list[Any]:
    """Call functions of a file, in one of the processes of :func:`run_in_turn`."""
    module = sys.modules[load_function(file, calls[0][0]).__module__]
    found = []
    for name, *arguments in calls:
        print(name, *arguments, flush=True)
        found.append(getattr(module, name)(*arguments))
        hvd.shutdown()
    return found
