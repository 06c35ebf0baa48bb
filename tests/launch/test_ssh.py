"""The launcher ssh on two hosts with real ssh servers: one job. tests/engines/test_ssh.py has all the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch import Host, JobSpec, Machine, ssh
from paceline.launch.remote.remote_job import copy_all
from paceline.launch.ssh import SshBackend
from tests.clusters.ssh import SshHosts, why_no_ssh

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh())]

#: Worker 1 fails; worker 0 would run on.
COMMAND = 'echo "$(hostname) $RANK $NOTE"; test $RANK = 0 && exec sleep 1000; echo why >&2; exit 7'


def test_failure_on_a_host_ends_the_job_everywhere(tmp_path: Path) -> None:
    with SshHosts(3) as cluster:
        launch = [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "0", "-H", "h1,h2", "--grace", "0.5"]
        launch += ["--env", 'NOTE=a, "b" $c', "-o", f"ssh=ssh -F {cluster.client_config}", "--", "sh", "-c", COMMAND]
        done = subprocess.run(
            cluster.command(launch), cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 7, done.stderr
        assert set(done.stdout.splitlines()) <= {'[worker 0] h1 0 a, "b" $c', '[worker 1] h2 1 a, "b" $c'}
        assert "worker 1 on h2 failed: exit code 7" in done.stderr
        assert "    why\n" in done.stderr
        assert [one for index in range(3) for one in cluster.processes(index)] == []


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "tcsh", "fish"])
@pytest.mark.parametrize("name", ['it\'s a "b"', "a!b\\n\\\\c\n$HOME `id` *{a,b}~%é\udcff"], ids=["plain", "odd"])
def test_every_login_shell_passes_a_command_on_as_it_is(shell: str, name: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / name).mkdir()
    script = 'cd "$1" || exit 91; printf "%s" "$PWD"'
    command = ssh.for_any_shell(["sh", "-c", script, "paceline", f"{tmp_path}/{name}"])
    done = subprocess.run([shell, "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
    assert os.fsdecode(done.stdout) == f"{tmp_path}/{name}"


@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_copy_that_stands_still_ends_and_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_SILENT_S", 1)
    command = ssh.rsync_command(["sh", "-c", "exec sleep 600"], Host("h1"), "/tmp/nowhere")
    assert "timeout" in copy_all({"h1": command})["h1"]


@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_copy_inside_of_its_source_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach = tmp_path / "reach"
    reach.write_text('#!/bin/sh\nwhile [ "$1" != h1 ]; do shift; done\nshift\nexec "$@"\n')
    reach.chmod(0o755)
    source = tmp_path / "source"
    (source / "deep" / "copy").mkdir(parents=True)
    (source / "train.py").touch()
    monkeypatch.chdir(source)
    spec = JobSpec(
        ("true",), 1, hosts=(Host("h1"),), directory=f"{source}/deep/copy", sync=True, options={"ssh": str(reach)}
    )
    copies = SshBackend().plan(spec, Machine.here()).copies
    for _ in range(2):
        assert copy_all(copies) == {}
    copied = {str(one.relative_to(source / "deep" / "copy")) for one in (source / "deep" / "copy").rglob("*")}
    assert copied == {"train.py", "deep"}
