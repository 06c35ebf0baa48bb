"""What every engine must do, and how its tests look for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of the examples and workers: the interpreter of the tests.
PYTHON = sys.executable
#: How long nothing may be left running after a job's end.
GONE_S = 5.0
_JOB_S = 300.0

Launch = Callable[[Sequence[str]], Sequence[str]]
"""Turns words of ``paceline launch`` into the command that runs on the engine's submit host."""


@dataclass(frozen=True)
class Done:
    """How a job ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


class Running:
    """A job that runs, with a mark in the environment of all its processes.

    Args:
        command: that launches it.
        env: of the launcher.
        mark: value of ``PACELINE_TEST_MARK``, given to the job with ``--env``.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], mark: str) -> None:
        self.mark = mark
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(env),
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    def wait_until(self, true: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Wait until something is true while the job runs."""
        until = time.monotonic() + timeout_s
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until, "it did not come true"
            time.sleep(0.1)

    def end(self, timeout_s: float = _JOB_S) -> Done:
        """Wait for the end of the launcher."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout_s:g} s\n{out}\n{err}") from None
        return Done(self.process.returncode, out, err)

    def processes(self) -> dict[int, str]:
        """Return the processes of the job on all hosts, with their command lines."""
        return marked(self.mark)

    def check_gone(self) -> None:
        """Check that no process of the job is left a moment after its end."""
        until = time.monotonic() + GONE_S
        while self.processes() and time.monotonic() < until:
            time.sleep(0.1)
        assert self.processes() == {}


def wait_for(true: Callable[[], bool], timeout_s: float = GONE_S) -> None:
    """Wait until something is true."""
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.1)


def marked(mark: str) -> dict[int, str]:
    """Return the living processes with a mark in their environment; this one sees those of all hosts."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if f"PACELINE_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ValueError):
                continue
    return found


def start(
    launch: Launch, words: Sequence[str], command: Sequence[str], env: Mapping[str, str] | None = None
) -> Running:
    """Launch a job."""
    mark = uuid.uuid4().hex
    given = ["--env", f"PACELINE_TEST_MARK={mark}", *words, "--", *command]
    return Running(launch(given), {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **(env or {})}, mark)


def check_trains(launch: Launch, folder: Path, words: Sequence[str] = ()) -> Done:
    """Train on two workers and two servers."""
    result = folder / "result.json"
    example = [PYTHON, "examples/train_mnist.py", "--network", "mlp", "--lr", "0.05", "--kv-store", "dist_sync"]
    example += ["--result", str(result)]
    job = start(launch, ["-n", "2", "-s", "2", "--env", "OMP_NUM_THREADS=1", *words], example)
    done = job.end()
    assert done.code == 0, done.text
    assert json.loads(result.read_text())["accuracy"][-1] >= 0.95
    job.check_gone()
    return done


FAILS = """\
import os, paceline, sys, time
store = paceline.kvstore.create("dist_sync")
def fail():
    raise RuntimeError("this one breaks")
if store.rank == 1:
    try:
        fail()
    except RuntimeError:
        import traceback
        traceback.print_exc()
        sys.exit(7)
store.barrier()
"""

STAYS = """\
import paceline, time
store = paceline.kvstore.create("dist_sync")
print("stays", store.rank, flush=True)
time.sleep(300)
"""


def check_failure(launch: Launch, words: Sequence[str] = ()) -> Done:
    """Let worker 1 fail: its exit code and traceback come back, and nothing is left."""
    job = start(launch, ["-n", "2", "-s", "1", *words], [PYTHON, "-c", FAILS])
    done = job.end()
    assert done.code == 7, done.text
    for text in ("line 4, in fail", "RuntimeError: this one breaks"):
        assert text in done.out + done.err, done.text
    assert re.search(r"^worker 1 on \S+ failed: exit code 7", done.out + done.err, re.MULTILINE), done.text
    job.check_gone()
    return done


def roles_of(job: Running) -> int:
    """Return how many processes of the job's command or roles run."""
    return sum("paceline server" in line or "time.sleep(300)" in line for line in job.processes().values())


def check_end(launch: Launch, end: Callable[[Running], None], code: int | None, words: Sequence[str] = ()) -> Done:
    """End a job that would stay; nothing is left of it."""
    job = start(launch, ["-n", "2", "-s", "1", *words], [PYTHON, "-c", STAYS])
    job.wait_until(lambda: roles_of(job) >= 3)
    end(job)
    done = job.end()
    if code is not None:
        assert done.code == code, done.text
    job.check_gone()
    return done
