"""Jobs on a real Grid Engine with three execution hosts."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.clusters.hosts import why_no_hosts
from tests.engines import jobs
from tests.engines.named_hosts import NamedHosts
from tests.engines.sge_hosts import SgeHosts, why_no_sge

WHY_NOT = why_no_hosts() or why_no_sge()
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible"),
    pytest.mark.timeout(400),
]


class Cluster:
    """The hosts, and the launcher's command."""

    def __init__(self, hosts: NamedHosts, sge: SgeHosts) -> None:
        self.hosts, self.sge = hosts, sge

    def launch(self, words: Sequence[str]) -> list[str]:
        return self.hosts.command("h1", [jobs.PYTHON, "-m", "paceline", "launch", "--launcher", "sge", *words])

    @property
    def env(self) -> dict[str, str]:
        return self.sge.environment


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="paceline-sge-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with NamedHosts(3, folder) as hosts, SgeHosts(hosts, folder) as sge:
            yield Cluster(hosts, sge)


@pytest.fixture(autouse=True)
def _environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SGE_ROOT", "SGE_CELL"):
        monkeypatch.setenv(name, cluster.env[name])
    yield
    assert [path.name for path in jobs.ROOT.glob(".paceline-*")] == []


def test_mnist_trains(cluster: Cluster, tmp_path: Path) -> None:
    jobs.check_trains(cluster.launch, tmp_path)


def test_failing_worker_ends_the_job_with_its_code_and_traceback(cluster: Cluster) -> None:
    jobs.check_failure(cluster.launch)


def test_ctrl_c_leaves_nothing(cluster: Cluster) -> None:
    jobs.check_end(cluster.launch, lambda job: job.process.send_signal(signal.SIGINT), 130)
    assert cluster.hosts.run("h1", "qstat") == ""


SAVES = "trap 'sleep 1; echo saved; exit 0' TERM; echo runs; while :; do sleep 0.1; done"


def test_workers_have_time_to_save_when_the_job_is_deleted(cluster: Cluster) -> None:
    job = jobs.start(cluster.launch, ["-n", "1", "-s", "0"], ["sh", "-c", SAVES])
    assert job.process.stdout is not None
    for line in job.process.stdout:
        if "runs" in line:
            break
    job.process.send_signal(signal.SIGTERM)
    done = job.end()
    assert done.code == 143, done.text
    assert "[worker 0] saved" in done.out, done.text
    job.check_gone()


def is_stopped() -> bool:
    """Tell whether Grid Engine has stopped the launcher inside the job. It gives notice, 20 s before."""
    return any(
        "paceline.launch.engines.sge" in (one.info["cmdline"] or ()) and one.info["status"] == psutil.STATUS_STOPPED
        for one in psutil.process_iter(["cmdline", "status"])
    )


def test_suspended_job_goes_on_when_it_is_resumed(cluster: Cluster, tmp_path: Path) -> None:
    waits = f"echo runs; while ! test -e {tmp_path}/go; do sleep 0.1; done"
    job = jobs.start(cluster.launch, ["-n", "2", "-s", "0"], ["sh", "-c", waits])
    assert job.process.stdout is not None
    for line in job.process.stdout:
        if "runs" in line:
            break
    number = cluster.hosts.run("h1", "qstat").splitlines()[-1].split()[0]
    cluster.hosts.run("h1", f"qmod -sj {number}")
    job.wait_until(is_stopped)
    (tmp_path / "go").touch()
    cluster.hosts.run("h1", f"qmod -usj {number}")
    done = job.end()
    assert done.code == 0, done.text


def test_kill_of_the_launcher_leaves_nothing(cluster: Cluster) -> None:
    jobs.check_end(cluster.launch, lambda job: job.process.kill(), -signal.SIGKILL)
    for folder in jobs.ROOT.glob(".paceline-*"):
        subprocess.run(["rm", "-r", str(folder)], check=True)


def test_groups_have_their_own_words_and_variables_with_all_quotes(cluster: Cluster) -> None:
    command = ["sh", "-c", 'echo $PACELINE_WORKER_GROUP "$NOTE" "$1" "$2"', "sh", "it's $x"]
    groups = ["--group", "new: n=2, slots=1", "--group", "old: n=1, args=more, env=NOTE='a, \"b\"'"]
    done = jobs.start(cluster.launch, ["-s", "0", *groups], command).end()
    assert done.code == 0, done.text
    lines = sorted(line for line in done.out.splitlines() if line.startswith("[worker"))
    assert lines == ["[worker 0] new  it's $x ", "[worker 1] new  it's $x ", '[worker 2] old a, "b" it\'s $x more'], (
        done.text
    )


def test_workers_spread_over_the_slots_that_grid_engine_gave(cluster: Cluster) -> None:
    done = jobs.start(cluster.launch, ["-n", "3", "-s", "0"], ["hostname"]).end()
    assert done.code == 0, done.text
    assert sorted(line.split()[-1] for line in done.out.splitlines() if line.startswith("[worker")) == [
        "h1",
        "h2",
        "h3",
    ], done.text


def test_job_of_the_users_own_is_used_from_inside(cluster: Cluster, tmp_path: Path) -> None:
    launch = f"{jobs.PYTHON} -m paceline launch --launcher sge -n 3 -s 0 -- hostname"
    script = tmp_path / "own"
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH={jobs.ROOT / 'src'}\ncd {jobs.ROOT}\nexec {launch}\n")
    out = tmp_path / "out"
    words = ["qsub", "-sync", "y", "-pe", "paceline", "3", "-S", "/bin/sh", "-j", "y", "-o", str(out), str(script)]
    cluster.hosts.run("h1", words, cluster.env, 120)
    lines = sorted(line.split()[-1] for line in out.read_text().splitlines() if line.startswith("[worker"))
    assert lines == ["h1", "h2", "h3"], out.read_text()


def test_missing_environment_says_which_there_are(cluster: Cluster) -> None:
    done = jobs.start(cluster.launch, ["-n", "1", "-o", "pe=mpi"], ["true"]).end(60)
    assert done.code == 1
    assert "no parallel environment 'mpi'; it has paceline: -o pe=NAME" in done.err


LOOKS = """\
import os, subprocess
print(len(os.environ["PACELINE_JOB_KEY"]))
look = "qstat -j $JOB_ID; cat /proc/[0-9]*/cmdline | tr '\\\\0' ' '"
print(subprocess.run(["sh", "-c", look], capture_output=True, text=True).stdout)
"""


def test_secrets_are_no_words_of_a_command_and_not_in_the_job(cluster: Cluster) -> None:
    words = ["-n", "1", "-s", "1", "--env", "AWS_SECRET"]
    done = jobs.start(cluster.launch, words, [jobs.PYTHON, "-c", LOOKS], {"AWS_SECRET": "hushhush"}).end()
    assert "[worker 0] 40" in done.out, done.text
    assert "job_name" in done.out
    assert "hushhush" not in done.out
