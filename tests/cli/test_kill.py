"""``paceline kill``: what it lists, asks and ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import paceline.cli.kill as command
from paceline.cli import main
from paceline.launch.processes import MarkedProcess, birth, marked

DEADLINE_S = 30.0
MINE = MarkedProcess(11, os.getuid(), "lost", "worker", "3", "100.00", 7500.0, "python train.py")
OTHER = MarkedProcess(12, os.getuid() + 1, "lost", "server", "0", "100.00", 3.0, "python -m paceline server")


class Host:
    """What runs here, and what was killed."""

    def __init__(self) -> None:
        self.found, self.killed = [MINE, OTHER], list[MarkedProcess]()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    one = Host()
    monkeypatch.setattr(command, "marked", lambda job: [p for p in one.found if p.job.startswith(job)])
    monkeypatch.setattr(command, "kill", one.killed.extend)
    return one


def answers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    terminal = io.StringIO(text)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)


def test_list_says_what_would_end(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kill", "--here", "--dry-run", "--all-users"]) == 0
    head, mine, other = capsys.readouterr().out.splitlines()
    assert head.split() == ["pid", "user", "job", "role", "rank", "age", "command"]
    assert mine.split()[2:] == ["lost", "worker", "3", "2", "h", "python", "train.py"]
    assert other.split()[-5:] == ["s", "python", "-m", "paceline", "server"]
    assert host.killed == []


def test_words_of_others_can_neither_move_the_cursor_nor_add_a_row(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.found = [replace(OTHER, job="a\nb", command="python \x1b[2J\u202e\udc80")]
    assert main(["kill", "--here", "--dry-run", "--all-users"]) == 0
    _, other = capsys.readouterr().out.splitlines()
    assert other.split()[2:3] == [r"a\nb"]
    assert other.endswith(r"python \x1b[2J\u202e\udc80")


def test_processes_of_other_users_are_left_out_and_counted(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kill", "--here", "--yes"]) == 0
    assert host.killed == [MINE]
    shown = capsys.readouterr().out.splitlines()
    assert shown[2:] == ["(1 process of other users left out: --all-users)", "1 process killed"]
    assert main(["kill", "--here", "--yes", "--all-users"]) == 0
    assert host.killed == [MINE, MINE, OTHER]


def test_nothing_ends_without_a_terminal_to_ask_at(
    host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["kill", "--here"]) == 2
    shown = capsys.readouterr()
    assert "python train.py" in shown.out
    assert "nothing was ended: there is no terminal to ask at; end these 1 with --yes" in shown.err
    assert host.killed == []


@pytest.mark.parametrize(("answer", "killed"), [("y\n", [MINE]), ("yes\n", [MINE]), ("\n", []), ("n\n", []), ("", [])])
def test_processes_end_only_after_a_yes(
    host: Host, answer: str, killed: list[MarkedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, answer)
    assert main(["kill", "--here"]) == 0
    assert host.killed == killed


def test_nothing_to_end_asks_nothing(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kill", "another", "--here"]) == 0
    assert capsys.readouterr().out == "nothing of job another of yours runs here\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--here", "-H", "h1,"], "give --here or -H, not both"),
        (["--yes"], "--yes: only with --here or -H"),
        (["--all-users", "--dry-run"], "--all-users, --dry-run: only with --here or -H"),
        (["--ssh", "ssh"], "--ssh reaches hosts; name them with -H"),
        (["-H", "h1,", "--ssh", ""], "--ssh is empty; it takes a command"),
        (["-H", ""], "-H is empty"),
    ],
)
def test_options_that_change_nothing_are_refused(
    words: list[str], message: str, host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kill", *words]) == 2
    assert message in capsys.readouterr().err
    assert host.killed == []


def test_beginning_of_an_id_names_a_job_as_without_here(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.found = [replace(MINE, job="ab12"), replace(MINE, job="ac34"), replace(OTHER, job="ad56"), MINE]
    assert main(["kill", "ab", "--here", "--yes"]) == 0
    assert host.killed == [replace(MINE, job="ab12")]
    assert main(["kill", "a", "--here", "--yes"]) == 1
    assert "several jobs begin with 'a': ab12, ac34; name one" in capsys.readouterr().err
    host.found.append(replace(MINE, job="a"))
    assert main(["kill", "a", "--here", "--yes"]) == 0
    assert host.killed[1:] == [replace(MINE, job="a")], "one that is named in full is meant"
    assert main(["kill", "ad", "--here", "--yes"]) == 0
    assert "(1 process of other users left out: --all-users)" in capsys.readouterr().out
    assert len(host.killed) == 2


def script(folder: Path, text: str) -> str:
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_other_hosts_list_first_and_end_after_a_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    ssh = script(
        tmp_path,
        f'case "$*" in *--dry-run*) echo list >> {log}; echo "pid user"; echo "7 ada";; *) echo "$*" >> {log};; esac',
    )
    assert main(["kill", "lost", "-H", "h1,", "--ssh", ssh, "--all-users"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "h1: pid user\nh1: 7 ada\n"
    assert "there is no terminal to ask at" in shown.err
    assert log.read_text() == "list\n"
    answers(monkeypatch, "y\n")
    assert main(["kill", "lost", "-H", "h1,", "--ssh", ssh, "--all-users"]) == 0
    assert "kill --here lost --all-users --yes" in log.read_text()


def test_host_that_cannot_be_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kill", "-H", "h1,h2", "--ssh", script(tmp_path, "exit 3")]) == 1
    assert capsys.readouterr().out == "h1: no word (exit code 3)\nh2: no word (exit code 3)\n"


def test_host_that_hangs_is_waited_for_no_longer_than_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_HOST_S", 2.0)
    ssh = script(tmp_path, 'case "$*" in *h1*) exec sleep 1000;; *) echo nothing;; esac')
    assert main(["kill", "-H", "h1,h2", "--ssh", ssh, "--dry-run"]) == 1
    assert capsys.readouterr().out == "h1: no answer within 2 s\nh2: nothing\n"


def test_processes_are_known_by_their_environment() -> None:
    job = f"known-{os.getpid()}"
    env = {"PATH": os.environ["PATH"], "PACELINE_JOB_ID": job, "PACELINE_ROLE": "worker", "PACELINE_RANK": "2"}
    unmarked = {"PATH": os.environ["PATH"]}
    with (
        subprocess.Popen(["sleep", "1000"], env=env) as worker,
        subprocess.Popen(["sleep", "1000"], env=unmarked) as other,
    ):
        try:
            [found] = marked(job)
            assert {worker.pid, other.pid} & {one.pid for one in marked()} == {worker.pid}
            assert (found.pid, found.uid, found.role, found.rank) == (worker.pid, os.geteuid(), "worker", "2")
            assert found.command == "sleep 1000"
            assert found.born == birth(worker.pid)
            assert 0 <= found.age_s < DEADLINE_S
        finally:
            worker.kill()
            other.kill()
    assert marked(job) == []
    assert birth(worker.pid) == ""


@pytest.fixture
def sleeping() -> Iterator[list[subprocess.Popen[bytes]]]:
    user = {"user": 65534} if os.getuid() == 0 else {}
    mine = {"PACELINE_JOB_ID": f"lost-{os.getpid()}", "PATH": os.environ["PATH"]}
    other = mine | {"PACELINE_JOB_ID": f"other-{os.getpid()}"}
    started = [
        subprocess.Popen(["setsid", "sleep", "1000"], env=mine),
        subprocess.Popen(["sleep", "1000"], env=other),
        subprocess.Popen(["sleep", "1000"], env=mine if user else other, **user),  # type: ignore[call-overload]
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_lost_job_ends_and_nothing_else(sleeping: list[subprocess.Popen[bytes]]) -> None:
    orphan, other_job, other_user = sleeping
    assert main(["kill", f"lost-{os.getpid()}", "--here", "--yes"]) == 0
    assert orphan.wait(DEADLINE_S) == -signal.SIGKILL
    assert other_job.poll() is None
    assert other_user.poll() is None
    if os.getuid() == 0:
        assert main(["kill", f"lost-{os.getpid()}", "--here", "--yes", "--all-users"]) == 0
        assert other_user.wait(DEADLINE_S) == -signal.SIGKILL
