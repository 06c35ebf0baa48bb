"""Hosts that a job reaches with a stand-in for ssh, which runs the agent on this host."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.launch.remote.agent_link import AgentLink
from paceline.launch.remote.remote_crew import RemoteCrew

#: Fails as ssh does, as often as there are lines in the file `fails`, and says one of them each time.
_SSH = """#!/bin/sh
read -r line < {folder}/fails && {{
  sed -i 1d {folder}/fails
  echo "$line" >&2
  exit 255
}}
for script; do :; done
sleep {delay_s}
{runs}
"""

BANNER = "Connection timed out during banner exchange"
TIMED_OUT = "ssh: connect to host h1 port 22: Connection timed out"


def launch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *fails: str, start_s: float = 60.0, delay_s: float = 0.0,
    python: str = sys.executable, script: str = "exit 7", runs: str = 'exec sh -c "$script"',
) -> int:  # fmt: skip
    """Run a job of one worker on a host; return its exit code."""
    (folder / "fails").write_text("".join(f"{line}\n" for line in fails))
    ssh = folder / "ssh"
    ssh.write_text(_SSH.format(folder=folder, delay_s=delay_s, runs=runs))
    ssh.chmod(0o700)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    words = ["launch", "-n", "1", "-s", "0", "-H", "h1,", "-o", f"ssh={ssh}", "--start-timeout", f"{start_s:g}"]
    words += ["-o", f"python={python}"]
    return main([*words, "--", "sh", "-c", script])


def test_host_that_is_too_busy_to_answer_is_reached_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.launch.remote.remote_crew._SHORTEST_PAUSE_S", 0.0)
    assert launch(tmp_path, monkeypatch, BANNER, "kex_exchange_identification: read: Connection reset by peer") == 7
    lines = [line for line in capfd.readouterr().err.splitlines() if "trying again" in line]
    assert lines == [
        "[launch] host h1 did not answer: is it up, and does a firewall let ssh through? "
        f"({BANNER}); trying again until 60 s have passed",
        "[launch] host h1 did not start an agent (exit code 255): "
        "kex_exchange_identification: read: Connection reset by peer; trying again until 60 s have passed",
    ]


def test_host_that_never_answers_is_given_up_when_the_time_for_the_start_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.launch.remote.remote_crew._LONGEST_PAUSE_S", 0.1)
    reach_again = RemoteCrew._reach_again

    def reach_later(self: RemoteCrew, link: AgentLink, now: float) -> None:
        reach_again(self, link, now)
        self._began -= 60.0

    monkeypatch.setattr(RemoteCrew, "_reach_again", reach_later)
    assert launch(tmp_path, monkeypatch, TIMED_OUT, TIMED_OUT) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if TIMED_OUT in line]
    assert ["trying again" in line for line in lines] == [True, False]


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "tcsh"])
def test_login_shell_that_another_one_has_replaced_is_told_the_command(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``exec zsh`` in a bashrc does: that shell reads what the launcher says."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    monkeypatch.setattr("paceline.launch.remote.agent_link._TYPE_AFTER_S", 0.1)
    assert launch(tmp_path, monkeypatch, runs=f"exec {shell}") == 7


def test_host_that_refuses_is_not_reached_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, monkeypatch, "h1: Permission denied (publickey).") == 1
    errors = capfd.readouterr().err
    assert "host h1 refused your ssh key" in errors
    assert "trying again" not in errors


def test_host_that_was_heard_has_as_long_again_to_start_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    began = time.monotonic()
    assert launch(tmp_path, monkeypatch, start_s=0.5, delay_s=0.4, python=str(slow)) == 1
    assert time.monotonic() - began > 0.9
    assert "no answer from h1 within 0.5 s" in capfd.readouterr().err


def test_host_that_is_lost_before_it_says_that_a_process_runs_fails_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    heard = RemoteCrew._heard

    def hear_no_start(self: RemoteCrew, link: AgentLink, line: list[Any]) -> None:
        """Hear the agent as if it had died between the start of a process and its line about that."""
        if line[0] != "started":
            heard(self, link, line)

    monkeypatch.setattr(RemoteCrew, "_heard", hear_no_start)
    assert launch(tmp_path, monkeypatch, script="kill -9 $PPID; exec sleep 1000") == 255
    assert "worker 0 on h1 failed: exit code 255: " in capfd.readouterr().err


def test_variable_that_other_hosts_do_not_get_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_DATA", "/data")
    assert launch(tmp_path, monkeypatch, script='echo "$MY_DATA $PWD"') == 0
    said = (
        "the command reads MY_DATA, which workers on other hosts do not get from this shell; to pass on: --env MY_DATA"
    )
    assert f"paceline: {said}\n" in capfd.readouterr().err
