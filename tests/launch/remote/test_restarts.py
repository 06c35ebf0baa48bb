"""Jobs that start again after a host was lost, with a stand-in for ssh."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.launch.remote.agent_link import AgentLink
from paceline.launch.remote.remote_crew import RemoteCrew

#: Reaches this host under every name, but h2 not while there is a file `gone`.
SSH = """#!/bin/sh
for word; do host=$script; script=$word; done
if test "$host" = h2 && test -e {folder}/gone; then
  echo "ssh: connect to host h2 port 22: No route to host" >&2
  exit 255
fi
exec sh -c "$script"
"""

#: At the first start host h2 dies; the second one ends well.
WORKER = """
test "$PACELINE_RESTART" = 0 || {{ echo ran $RANK; exit 0; }}
test $RANK = 1 || exec sleep 1000
touch gone
{back}
kill -9 $PPID
exec sleep 1000
"""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time for the start pass as soon as h1 has answered."""
    reach_again = RemoteCrew._reach_again

    def reach_later(self: RemoteCrew, link: AgentLink, now: float) -> None:
        reach_again(self, link, now)
        if self._links["h1"].about:
            self._began -= 60.0

    monkeypatch.setattr(RemoteCrew, "_reach_again", reach_later)


def launch(folder: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, back: str = "") -> int:
    """Run a job of two workers on the hosts; return its exit code. ``back``: what brings h2 back."""
    ssh = folder / "ssh"
    ssh.write_text(SSH.format(folder=folder))
    ssh.chmod(0o700)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(folder)
    words = ["launch", "-n", "2", "-s", "0", "-H", hosts, "-o", f"ssh={ssh}", "--start-timeout", "60"]
    words += ["--grace", "0.2", "--max-restarts", "1"]
    return main([*words, "--", "sh", "-c", WORKER.format(back=back)])


@pytest.mark.usefixtures("short")
def test_host_that_stays_away_is_left_out_where_the_others_have_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, monkeypatch, "h1,h2") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[worker 0] ran 0", "[worker 1] ran 1"]
    assert "trying again until 60 s have passed" in err
    assert "the job goes on without h2, on h1\n" in err


@pytest.mark.usefixtures("short")
def test_host_that_the_job_cannot_do_without_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, monkeypatch, "h1 slots=1,h2 slots=1") == 1
    err = capfd.readouterr().err
    assert "No route to host" in err
    assert "the job cannot go on without h2: 2 workers do not fit: the hosts h1 have 1 slots for them" in err


def test_host_that_comes_back_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    back = "setsid sh -c 'echo >back; sleep 2; rm gone' </dev/null >/dev/null 2>&1 & until test -e back; do :; done"
    assert launch(tmp_path, monkeypatch, "h1 slots=1,h2 slots=1", back=back) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[worker 0] ran 0", "[worker 1] ran 1"]
