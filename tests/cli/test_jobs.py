from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import LaunchError
from paceline.launch import runtime
from paceline.observe.table import quantity, table
from tests.clusters import programs

DEADLINE_S = 90.0

WAITS = """
import sys, time, torch
from pathlib import Path
from paceline import kvstore

store = kvstore.create("dist_sync")
store.init(0, torch.zeros(1000))
for _ in range(3):
    store.push(0, torch.ones(1000))
    store.pull(0, torch.zeros(1000))
if store.rank == 0:
    print("ready", flush=True)
    store.barrier()
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
if store.rank == 1:
    store.barrier()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    return run / "paceline"


def test_full_disk_leaves_no_part_of_a_record(folder: Path) -> None:
    code = (
        "import resource; from paceline.launch.runtime import JobRecord, write;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); write(JobRecord('full', 1, '', 0.0, '', (), 1, 1))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in ended.stderr
    assert list(folder.iterdir()) == []


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "launch", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(job: subprocess.Popen[str], text: str) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if text in line:
            return
    assert job.stderr is not None
    pytest.fail(f"{text!r} did not come: {job.stderr.read()}")


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[str]]:
    job = start("-n", "1", "-s", "0", "--", "sh", "-c", "echo runs; exec sleep 1000")
    wait_for(job, "runs")
    yield job
    if job.poll() is None:
        job.kill()
    job.communicate()


def test_status_shows_every_process(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    words = ["-m", "paceline", "launch", "-n", "2", "-s", "1", "--", sys.executable, tmp_path / "train.py"]
    read, write = os.pipe()
    with open(read) as output, programs.started([*words, tmp_path / "go"], write, write) as job:
        os.close(write)
        assert "ready" in next((line for line in output if "ready" in line), "it did not come")
        until = time.monotonic() + DEADLINE_S
        rows: list[dict[str, object]] = []
        while not any(row["waits_for"] == [1] for row in rows) or not all(row["memory"] for row in rows):
            assert time.monotonic() < until, rows
            assert main(["status", "--json"]) == 0
            rows = json.loads(capsys.readouterr().out)["processes"]
        assert [(row["role"], row["rank"], row["state"]) for row in rows] == [
            ("server", 0, "live"),
            ("worker", 0, "live"),
            ("worker", 1, "live"),
        ]
        assert main(["status"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert re.split("  +", shown[0])[5:8] == ["pace", "step", "waits for"]
        assert len(shown) == 4
        assert len(list(folder.glob("*.json"))) == 1
        modes = {(one.is_dir(), stat.S_IMODE(one.stat().st_mode)) for one in (folder, *folder.rglob("*"))}
        assert modes == {(True, 0o700), (False, 0o600)}
        (tmp_path / "go").touch()
        assert job.wait(DEADLINE_S) == 0
    assert list(folder.glob("*.json")) == []
    assert main(["status"]) == 1
    assert "no job of yours runs on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["it begins", "it has its file", "it runs"])
def test_sigquit_to_the_group_leaves_no_file_of_the_job(moment: str, folder: Path) -> None:
    words = ["launch", "-n", "1", "-s", "0", "--", "sh", "-c", "echo runs; exec sleep 1000"]
    as_from_a_terminal = partial(signal.signal, signal.SIGQUIT, signal.SIG_DFL)  # a job of `make test &` ignores it
    command = [sys.executable, "-m", "paceline", *words]
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=as_from_a_terminal,  # noqa: PLW1509
    )
    until = time.monotonic() + DEADLINE_S
    while moment == "it has its file" and not list(folder.glob("*.json")):
        assert time.monotonic() < until
    if moment == "it runs":
        wait_for(job, "runs")
    os.killpg(job.pid, signal.SIGQUIT)
    job.communicate(timeout=DEADLINE_S)
    assert job.returncode in (131, -signal.SIGQUIT)
    assert list(folder.glob("*.json")) == []


def test_jobs_are_listed_and_killed(sleeping: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "pid", "started", "n+s", "hosts", "command"]
    assert row.split()[1] == str(sleeping.pid)
    assert row.endswith("sh -c 'echo runs; exec sleep 1000'")
    assert main(["status"]) == 1
    assert "has no scheduler" in capsys.readouterr().err
    assert main(["kill", row.split()[0][:4]]) == 0
    assert sleeping.wait(DEADLINE_S) == 143
    assert main(["jobs"]) == 0
    assert "no job of yours runs here" in capsys.readouterr().out


def test_file_of_a_killed_launcher_is_forgotten(sleeping: subprocess.Popen[str], folder: Path) -> None:
    sleeping.send_signal(signal.SIGKILL)
    sleeping.wait()
    assert len(list(folder.iterdir())) == 1
    assert runtime.jobs() == []
    assert list(folder.iterdir()) == []


def test_job_must_be_named_if_there_are_several(sleeping: subprocess.Popen[str]) -> None:
    second = start("-n", "1", "-s", "0", "--", "sh", "-c", "echo runs; exec sleep 1000")
    try:
        wait_for(second, "runs")
        with pytest.raises(LaunchError, match="several jobs run on this machine"):
            runtime.find("")
        with pytest.raises(LaunchError, match="no job 'zzz' runs on this machine"):
            runtime.find("zzz")
    finally:
        second.terminate()
        second.communicate()


def test_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match="is not a folder that only you can use"):
        runtime.jobs()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kill", "a", "b"], "one job at a time, not a and b"),
        (["status", "a", "b"], "one job at a time, not a and b"),
        (["kill", "-H", "a slots=x,b"], "slots=x is not a number"),
        (["doctor"], "the hosts are missing; give -H"),
        (["doctor", "-H", "no-such-file"], "the hostfile 'no-such-file' cannot be read"),
        (["doctor", "-H", "h1,", "--timeout", "nan"], "--timeout: 'nan' is not a number above 0"),
        (["doctor", "-H", "h1,", "--ssh", ""], "--ssh is empty; it takes a command"),
        (["doctor", "-H", "h1,", "--ssh", "'"], '--ssh "\'": No closing quotation'),
        (["status", "--watch=3"], "--watch: takes no value, but got '3'"),
        (["jobs", "--all"], "unknown option '--all'; there are no options here"),
        (["run"], "works inside an allocation only"),
    ],
)
def test_mistake_is_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_numbers_of_a_table_stand_to_the_right() -> None:
    assert table(("name", "n"), [("a", "1"), ("bc", "10")]) == "name   n\na      1\nbc    10"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_have_a_unit_that_fits(size: int, text: str) -> None:
    assert quantity(size) == text


def test_connections_and_messages_are_logged_when_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    (tmp_path / "go").touch()
    words = ["-n", "2", "-s", "1", "--", sys.executable, tmp_path / "train.py", tmp_path / "go"]
    for variable, value, message in (("PS_VERBOSE", "1", False), ("PACELINE_VERBOSE", "2", True)):
        launch = ["-m", "paceline", "launch", *words]
        lines = programs.run(launch, env={variable: value}, timeout_s=DEADLINE_S, check=True).stderr.splitlines()
        for role in ("scheduler", "server 0", "worker 1"):
            assert any(f"[{role}]" in line and "INFO" in line and "connect" in line for line in lines), role
        assert any("[worker 0]" in line and "DEBUG" in line and "to server 0" in line for line in lines) == message
