"""Forked programs, and the jobs of forked launchers, behave like those that are started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.clusters import programs

WORKER = """
import atexit, os, sys
print(sys.argv[1:], os.environ["PACELINE_RANK"], os.getsid(0) == os.getpid(), "torch" in sys.modules)
atexit.register(print, "the end")
assert os.path.basename(sys.path[0]) == "scripts", sys.path
open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
assert open_files[0] == os.devnull and open_files[1] != open_files[2]
assert all(int(fd) <= 3 for fd in os.listdir("/proc/self/fd")), "files of the launcher"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(WORKER)
    return path


def launch(*words: object, job: str = "-n 2 -s 0", **options: float) -> tuple[int, str, str]:
    done = programs.run(["-m", "paceline", "launch", *job.split(), "--", *words], **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "output", "errors"),
    [
        (["-c", "import sys; print(sys.argv[1:], end='')", "a", 1], 0, "['a', '1']", ""),
        (["-c", "import os; print(os.getcwd(), end='')"], 0, "/usr", ""),
        (["-c", "import sys; sys.exit(3)"], 3, "", ""),
        (["-c", "import sys; sys.exit('why')"], 1, "", "why\n"),
        (["-m", "paceline", "--nonsense"], 2, "", "paceline: unknown command '--nonsense'"),
    ],
)
def test_program_has_its_words_directory_streams_and_exit_code(
    words: list[object], code: int, output: str, errors: str
) -> None:
    done = programs.run(words, cwd="/usr")
    assert (done.returncode, done.stdout) == (code, output)
    assert done.stderr.startswith(errors) if errors else done.stderr == ""


def test_processes_of_a_launcher_are_forked_and_have_nothing_of_it(script: Path) -> None:
    code, output, errors = launch(sys.executable, script, "x")
    assert (code, errors) == (0, "")
    expected = [f"[worker {rank}] {text}" for rank in (0, 1) for text in (f"['x'] {rank} True True", "the end")]
    assert sorted(output.splitlines()) == sorted(expected)


def test_other_programs_are_started(script: Path) -> None:
    assert launch("sh", "-c", "echo $PACELINE_RANK", job="-n 1 -s 0") == (0, "[worker 0] 0\n", "")


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("raise ArithmeticError('no number')", 1, "    ArithmeticError: no number"),
        ("raise SystemExit('a text')", 1, "    a text"),
        ("raise SystemExit(7)", 7, "worker 0 failed: exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", 137, "worker 0 failed: killed by SIGKILL (exit code 137)"),
    ],
)
def test_failure_of_a_forked_worker_is_that_of_the_job(script: Path, text: str, code: int, why: str) -> None:
    script.write_text(text)
    found, _, errors = launch(sys.executable, script, job="-n 1 -s 0")
    assert (found, why in errors) == (code, True), errors


def runs(pid: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE)
    return False


def test_job_ends_with_its_launcher(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    words = ["-m", "paceline", "launch", "-n", "2", "-s", "1", "--", sys.executable, "-c", code]
    path = tmp_path / "output"
    with path.open("wb") as output, programs.started(words, output.fileno(), output.fileno()) as launcher:
        while len(pids := re.findall(r"\[worker \d\] (\d+)\n", path.read_text())) < 2:
            assert launcher.poll() is None, path.read_text()
            time.sleep(0.02)
        launcher.send_signal(signal.SIGKILL)
        until = time.monotonic() + 60.0
        while any(map(runs, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(runs, pids))


def test_signal_ends_the_program_and_its_job(tmp_path: Path) -> None:
    path = tmp_path / "output"
    words = ["-m", "paceline", "launch", "-n", "1", "-s", "0", "--", sys.executable, "-c"]
    words.append("import time; print('runs'); time.sleep(600)")
    with path.open("wb") as output, programs.started(words, output.fileno(), output.fileno()) as launcher:
        while "runs" not in path.read_text():
            assert launcher.poll() is None, path.read_text()
            time.sleep(0.02)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130
    assert "KeyboardInterrupt" in path.read_text(), "the worker got it, too"


def test_variables_that_are_read_at_the_start_are_refused() -> None:
    with pytest.raises(AssertionError, match="reads at its start"):
        programs.run(["-c", "1"], env={"PYTHONPATH": "/nowhere" + os.pathsep})
