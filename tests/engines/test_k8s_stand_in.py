"""The launcher k8s against a stand-in for kubectl that runs pods as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines import jobs

pytest.importorskip("yaml")
pytestmark = pytest.mark.timeout(400)

STAND_IN = Path(__file__).with_name("kubectl_stand_in.py")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "objects").mkdir()
    program = tmp_path / "bin" / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {jobs.PYTHON} {STAND_IN} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECTL_STAND_IN", str(tmp_path / "objects"))
    monkeypatch.setenv("KUBECTL_CWD", str(jobs.ROOT))
    return tmp_path / "objects"


def launch(words: Sequence[str]) -> list[str]:
    options = ["-o", "image=here", "-o", "layout=pods", "-o", f"python={jobs.PYTHON}", "-o", "port=9391"]
    return [jobs.PYTHON, "-m", "paceline", "launch", "--launcher", "k8s", *options, *words]


def launch_indexed(words: Sequence[str]) -> list[str]:
    return launch(["-o", "layout=jobs", *words])


def left(cluster: Path) -> list[str]:
    return [path.name for path in cluster.iterdir()]


@pytest.mark.slow
def test_mnist_trains(cluster: Path, tmp_path: Path) -> None:
    done = jobs.check_trains(launch, tmp_path, ["--env", f"PYTHONPATH={jobs.ROOT / 'src'}:{jobs.ROOT}"])
    assert "[worker 0]" in done.out
    assert left(cluster) == []


def test_failing_worker_ends_the_job_with_its_code_and_traceback(cluster: Path) -> None:
    done = jobs.start(
        launch, ["-n", "2", "-s", "1", "--env", f"PYTHONPATH={jobs.ROOT / 'src'}"], [jobs.PYTHON, "-c", jobs.FAILS]
    ).end()
    assert done.code == 7, done.text
    assert "[worker 1] RuntimeError: this one breaks" in done.out
    assert "worker 1 failed: exit code 7: Error on here (pod pl-" in done.err, done.text
    assert left(cluster) == []


def test_job_is_started_again_after_a_failure(cluster: Path) -> None:
    command = ["sh", "-c", "echo restart $PACELINE_RESTART; test $PACELINE_RESTART = 1"]
    done = jobs.start(launch, ["-n", "1", "-s", "0", "--max-restarts", "2"], command).end()
    assert done.code == 0, done.text
    assert "[worker 0] restart 0" in done.out
    assert "[worker 0] restart 1" in done.out
    assert left(cluster) == []


def test_a_cluster_without_indexed_jobs_gets_a_job_per_process(cluster: Path) -> None:
    done = jobs.start(launch_indexed, ["-n", "2", "-s", "0"], ["sh", "-c", "echo rank $RANK"]).end()
    assert done.code == 0, done.text
    assert "[launch] Kubernetes 1.20 has no Indexed Jobs: a Job per process" in done.err
    assert "[worker 1] rank 1" in done.out
    assert left(cluster) == []


def test_paceline_kill_deletes_everything(cluster: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def end(job: jobs.Running) -> None:
        env = {**os.environ, "PYTHONPATH": str(jobs.ROOT / "src")}
        subprocess.run([jobs.PYTHON, "-m", "paceline", "kill"], check=True, env=env)

    words = ["--env", f"PYTHONPATH={jobs.ROOT / 'src'}"]
    jobs.check_end(launch, end, 128 + signal.SIGTERM, words)
    assert left(cluster) == []


def test_ctrl_c_deletes_everything(cluster: Path) -> None:
    words = ["--env", f"PYTHONPATH={jobs.ROOT / 'src'}"]
    jobs.check_end(launch, lambda job: job.process.send_signal(signal.SIGINT), 130, words)
    assert left(cluster) == []


def test_kill_of_the_launcher_deletes_everything(cluster: Path) -> None:
    words = ["--env", f"PYTHONPATH={jobs.ROOT / 'src'}"]
    jobs.check_end(launch, lambda job: job.process.kill(), -signal.SIGKILL, words)
    jobs.wait_for(lambda: left(cluster) == [])


def test_words_with_dollars_and_quotes_arrive(cluster: Path) -> None:
    command = ["sh", "-c", 'echo "$A" "$1"', "sh", "$(Y) $$"]
    done = jobs.start(launch, ["-n", "1", "-s", "0", "--env", "A=$(X) 'b' $$"], command).end()
    assert "[worker 0] $(X) 'b' $$ $(Y) $$" in done.out, done.text
