"""A whole job on this machine."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import paceline
from paceline import config
from paceline.launch.supervise.events import Ready
from paceline.launch.supervise.guardian import Guardian
from paceline.launch.supervise.ready import ReadyPipe
from paceline.net.security import new_job_key
from paceline.testing.channel import readable
from paceline.testing.faults import VARIABLE, Faults
from paceline.testing.process import Process, Start, Worker, WorkerFailedError, start_program

#: Seconds for the start of a process. A launcher counts the CPU time that processes get; here time goes on while a busy
#: machine lets them wait.
_START_TIMEOUT_S = 300.0

_SOURCES = str(Path(paceline.__file__).parent.parent)


class LocalJob:
    """A scheduler and servers as processes, and workers that run functions; all of them end with the ``with`` block.

    A worker runs a function of the module level of a file in a new Python process: arguments and result are JSON.
    Processes use one thread each, so that results do not depend on the machine. ::

        with LocalJob(num_workers=2, num_servers=2) as job:
            losses = job.run(train, "adam", 50)

    Args:
        num_workers: number of workers.
        num_servers: number of servers.
        environment: further variables for all processes.
        faults: faults of the network and the processes; see :class:`paceline.testing.Faults`.
        **settings: fields of :class:`paceline.config.Settings` for all processes; ``check_rules`` is on by
            default, and ``start_timeout_s`` is 300, as tests may run on a busy machine.

    Attributes:
        scheduler: the scheduler's process.
        servers: the servers' processes, by rank.
        workers: all workers started so far.
        job_key: the job's key.
        address: where the scheduler listens.
        start_process: starts the processes of all jobs.
    """

    start_process: ClassVar[Start] = staticmethod(start_program)
    _scheduler_host = "127.0.0.1"

    def __init__(
        self,
        num_workers: int = 1,
        num_servers: int = 1,
        *,
        environment: Mapping[str, str] | None = None,
        faults: Faults | None = None,
        **settings: Any,
    ) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self._faults = faults
        self.job_key = new_job_key()
        self.workers: list[Worker] = []
        self.servers: list[Process] = []
        self._extra = dict(environment or {}) | ({VARIABLE: faults.to_json()} if faults is not None else {})
        settings = {"check_rules": True, "start_timeout_s": _START_TIMEOUT_S} | settings
        self._settings = {config.variable(name): _text(value) for name, value in settings.items()}

    # ---- a job's life ----------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalJob:
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            self._guardian = Guardian()
            self._stack.callback(self._guardian.close)
            self._start_scheduler()
            for rank in range(self.num_servers):
                self.servers.append(self._start(f"server {rank}", "server", rank, self.environment("server", rank)))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start_scheduler(self) -> None:
        ready = ReadyPipe()
        try:
            env = self._environment("scheduler", 0, f"tcp://{self._scheduler_host}:0")
            env |= {"PACELINE_READY_FD": str(ready.write_fd)}
            self.scheduler = self._start("scheduler", "scheduler", 0, env, [ready.write_fd])
            ready.close_write()
            self.address = self._scheduler_address(ready)
        finally:
            ready.close()

    def _scheduler_address(self, ready: ReadyPipe) -> str:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            readable([ready.fd], deadline - time.monotonic())
            for event in ready.news():
                if isinstance(event, Ready):
                    return event.address
            if ready.ended:
                raise RuntimeError(f"the scheduler ended at once:\n{self.scheduler.output}")
        raise TimeoutError(f"the scheduler did not say where it listens within {_START_TIMEOUT_S:g} s")

    def _start(self, name: str, role: str, rank: int, env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Process:
        program = "paceline.testing.faulty" if self._faults is not None and role == "server" else "paceline"
        argv = self._placed(role, rank, [sys.executable, "-m", program, role])
        process = Process(name, argv, env, self._directory, self._guardian, pass_fds, type(self).start_process)
        self._stack.callback(process.close)
        return process

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        """Return the command that runs ``argv`` on the host of a process; jobs on several hosts override it."""
        return argv

    # ---- environment -----------------------------------------------------------------------------------------------

    def environment(self, role: str, rank: int) -> dict[str, str]:
        """Return the environment of a process of this job."""
        return self._environment(role, rank, self.address)

    def _environment(self, role: str, rank: int, scheduler: str) -> dict[str, str]:
        own = {
            "role": role, "rank": rank, "local_rank": rank, "job_id": "test", "job_key": self.job_key,
            "num_workers": self.num_workers, "num_servers": self.num_servers, "scheduler": scheduler,
        }  # fmt: skip
        env = common_environment() | self._extra
        return env | {config.variable(name): str(value) for name, value in own.items()} | self._settings

    # ---- workers ---------------------------------------------------------------------------------------------------

    def start(
        self,
        rank: int,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start one worker.

        Args:
            rank: its rank.
            function: function at the module level of a file.
            *arguments: its arguments, as JSON.
            environment: variables that differ from :meth:`environment`; an empty text is the same as none.

        Raises:
            ValueError: the function cannot be found by its name in another process.
        """
        if "." in function.__qualname__ or "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not at the module level of its file; move it there")
        number = len(self.workers)
        task, result = self._directory / f"task-{number}.json", self._directory / f"result-{number}.json"
        task.write_text(
            json.dumps(
                {
                    "file": inspect.getfile(function),
                    "function": function.__name__,
                    "arguments": arguments,
                    "result": str(result),
                }
            )
        )
        argv = self._placed("worker", rank, [sys.executable, "-m", "paceline.testing.worker", str(task)])
        env = self.environment("worker", rank) | dict(environment or {})
        name = f"worker {rank} ({number})"
        worker = Worker(name, argv, env, self._directory, self._guardian, result, type(self).start_process)
        self.workers.append(worker)
        self._stack.callback(worker.close)
        return worker

    def start_all(self, function: Callable[..., Any], *arguments: Any) -> list[Worker]:
        """Start all workers with the same function and arguments."""
        return [self.start(rank, function, *arguments) for rank in range(self.num_workers)]

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        """Run a function in all workers and return what each returned, by rank.

        Raises:
            TimeoutError: a worker still runs.
            WorkerFailedError: one failed; the text says which, with the output of the processes.
        """
        workers = self.start_all(function, *arguments)
        deadline = time.monotonic() + timeout_s
        try:
            return [worker.result(max(0.1, deadline - time.monotonic())) for worker in workers]
        except (WorkerFailedError, TimeoutError) as error:
            raise type(error)(f"{error}\n{self.report()}") from None

    def report(self) -> str:
        """Return the output of all processes, for messages."""
        processes: list[Process] = [self.scheduler, *self.servers, *self.workers]
        return "\n".join(f"---- {one.name} (exit code {one.code})\n{one.output}" for one in processes)


def common_environment() -> dict[str, str]:
    """Return the environment that processes of all jobs start with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "DMLC_"))}
    path = os.pathsep.join(part for part in (_SOURCES, os.environ.get("PYTHONPATH", "")) if part)
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
