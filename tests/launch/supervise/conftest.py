"""Jobs of small shell scripts under the real supervisor, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

#: Far more than anything here takes, even on a machine that is busy with something else.
DEADLINE_S = 60.0

RUN_PLAN = str(Path(__file__).with_name("run_plan.py"))


class Job:
    """A launcher with its processes; every process carries a mark by which the test finds what is left of the job."""

    def __init__(self, folder: Path, **graces: float) -> None:
        self.folder = folder
        self.mark = f"MARK={uuid.uuid4()}".encode()
        self.graces = {"start_s": 30, "survivors_s": 20, "leave_s": 20, "terminate_s": 10, "kill_s": 10} | graces
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        *workers: str,
        scheduler: str | None,
        servers: Sequence[str] = (),
        shell: str = "sh",
        ignored: Sequence[int] = (),
        out_fd: int | None = None,
        terminal: int | None = None,
        own_group: bool = False,
        agents: bool = False,
        silence_s: float | None = None,
    ) -> Job:
        """Start the job; every script runs in the job's folder, where ``all-done`` is a fifo.

        ``shell`` runs the workers' scripts, ``ignored`` are signals the launcher finds ignored, ``out_fd`` is its
        stdout, ``terminal`` its stdout and stderr, where it shows how the job does, and with ``own_group`` it leads a
        process group of its own. With ``agents`` there are two hosts, one for the workers, and their agents take a
        launcher for dead that is silent for ``silence_s``.
        """
        os.mkfifo(self.folder / "all-done")
        roles = {"scheduler": [] if scheduler is None else [scheduler], "server": servers, "worker": workers}
        processes = [
            (role, rank, [shell if role == "worker" else "sh", "-c", script])
            for role, scripts in roles.items()
            for rank, script in enumerate(scripts)
        ]
        name, _, value = self.mark.decode().partition("=")
        plan = {"processes": processes, "graces": self.graces, "agents": agents, "silence_s": silence_s}
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, RUN_PLAN, json.dumps(plan | {"quiet": terminal is None})],
                cwd=self.folder,
                env=os.environ | {name: value, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"},
                stdin=subprocess.DEVNULL,
                stdout=(out if out_fd is None else out_fd) if terminal is None else terminal,
                stderr=err if terminal is None else terminal,
                process_group=0 if own_group else None,
                preexec_fn=partial(_signals_as_from_a_terminal, ignored),  # noqa: PLW1509
            )
        return self

    def wait(self) -> int:
        """Return the launcher's exit code."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def send(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def out(self) -> list[str]:
        return (self.folder / "out").read_text().splitlines()

    def err(self) -> list[str]:
        return (self.folder / "err").read_text().splitlines()

    def wait_for_file(self, name: str) -> str:
        """Return the text of a file as soon as a process of the job has written a whole line into it."""
        path = self.folder / name
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{name} of {self.out()} {self.err()}")
        return path.read_text().strip()

    def left(self) -> list[str]:
        """Return the command lines of live processes that carry the job's mark."""
        return [text for text in map(self._command, Path("/proc").iterdir()) if text is not None]

    def wait_until_nothing_is_left(self) -> None:
        wait_until(lambda: not self.left(), lambda: f"end of {self.left()}")

    def _command(self, process: Path) -> str | None:
        try:
            if not process.name.isdigit() or self.mark not in (process / "environ").read_bytes():
                return None
            return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended, or somebody else's
            return None


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {DEADLINE_S:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.01)


def _signals_as_from_a_terminal(ignored: Sequence[int]) -> None:
    """Undo what a shell does to the signals of background jobs, so that the launcher can be interrupted."""
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**graces: float) -> Job:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Job(folder, **graces))
        return made[-1]

    yield make
    for job in made:
        if job.process is not None and job.process.poll() is None:
            job.process.kill()
            job.process.wait()
