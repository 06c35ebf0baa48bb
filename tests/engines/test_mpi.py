"""The launcher mpi: Open MPI and MPICH across hosts with real ssh servers."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.ssh import SshHosts, why_no_ssh
from tests.engines import small_jobs
from tests.engines.small_jobs import DEADLINE_S, trained, wait_until_clean, write_training

KINDS = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
WHY_NOT = why_no_ssh()


@pytest.fixture(scope="module")
def cluster() -> Iterator[SshHosts]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with SshHosts(3) as made:
        yield made


@pytest.fixture(params=sorted(KINDS))
def mpirun(request: pytest.FixtureRequest, cluster: SshHosts) -> str:
    """The user's command for mpirun, with the options that this network needs."""
    kind = str(request.param)
    if shutil.which(KINDS[kind]) is None:
        pytest.skip(f"needs {KINDS[kind]} (packages openmpi-bin, mpich)")
    shell = cluster.folder / "remote-shell"
    shell.write_text(f'#!/bin/sh\nexec ssh -F {cluster.client_config} "$@"\n')
    shell.chmod(0o755)
    if kind == "openmpi":
        return f"{KINDS[kind]} --mca plm_rsh_agent {shell} --mca oob_tcp_if_include 10.77.0.0/24"
    return f"{KINDS[kind]} -launcher ssh -launcher-exec {shell} -iface eth0"


def start(cluster: SshHosts, mpirun: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    hosts = f"{cluster[1].address},{cluster[2].address}"
    launch = [sys.executable, "-m", "paceline", "launch", "--launcher", "mpi", "-H", hosts, "-o", f"mpirun={mpirun}"]
    return small_jobs.start(cluster.command([*launch, *words]), folder)


def left(cluster: SshHosts) -> list[str]:
    return [one for index in range(3) for one in cluster.processes(index)]


@pytest.mark.root
def test_job_trains(cluster: SshHosts, mpirun: str, tmp_path: Path) -> None:
    job = start(cluster, mpirun, tmp_path, "-n", "2", "-s", "2", "--", sys.executable, write_training(tmp_path))
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    assert trained(out, ["h1", "h2"]), out
    wait_until_clean(lambda: left(cluster))


@pytest.mark.root
def test_workers_see_no_rank_but_ours(cluster: SshHosts, mpirun: str, tmp_path: Path) -> None:
    text = "echo $RANK $LOCAL_RANK $MASTER_ADDR; env | grep -E '^(OMPI|PMI)' | sort"
    job = start(cluster, mpirun, tmp_path, "-n", "2", "-s", "0", "--", "sh", "-c", text)
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == ["[worker 0] 0 0 10.77.0.2", "[worker 1] 1 0 10.77.0.2"]


@pytest.mark.root
def test_failure_comes_back_and_nothing_is_left(cluster: SshHosts, mpirun: str, tmp_path: Path) -> None:
    text = "test $RANK = 1 || exec sleep 1000; echo boom >&2; exit 7"
    job = start(cluster, mpirun, tmp_path, "-n", "2", "-s", "0", "--grace", "0.5", "--", "sh", "-c", text)
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 7
    assert f"worker 1 on {cluster[2].address} failed: exit code 7" in err
    assert "    boom\n" in err
    wait_until_clean(lambda: left(cluster))


@pytest.mark.root
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_ends(
    cluster: SshHosts, mpirun: str, tmp_path: Path, signum: signal.Signals
) -> None:
    job = start(cluster, mpirun, tmp_path, "-n", "2", "-s", "0", "--", "sh", "-c", "echo runs; exec sleep 1000")
    assert job.stdout is not None
    assert "runs" in job.stdout.readline()
    started = time.monotonic()
    job.send_signal(signum)
    job.communicate(timeout=DEADLINE_S)
    assert job.returncode == (130 if signum == signal.SIGINT else -signum)
    assert time.monotonic() - started < 10
    wait_until_clean(lambda: left(cluster))
