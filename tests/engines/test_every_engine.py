"""MNIST on ssh, Open MPI, MPICH and Slurm."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.slurm import SlurmCluster, why_no_slurm
from tests.clusters.ssh import SshHosts, why_no_ssh
from tests.engines import jobs
from tests.engines.small_jobs import wait_until_clean

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh() or "possible"),
    pytest.mark.timeout(400),
]

LAUNCH = [sys.executable, "-m", "paceline", "launch", "--launcher"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(3) as made:
        shell = made.folder / "remote-shell"
        shell.write_text(f'#!/bin/sh\nexec ssh -F {made.client_config} "$@"\n')
        shell.chmod(0o755)
        yield made


@pytest.fixture(params=["ssh", "openmpi", "mpich", "slurm"])
def launch(
    request: pytest.FixtureRequest, hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[jobs.Launch]:
    if request.param == "slurm":
        if why_no_slurm():
            pytest.skip(why_no_slurm())
        with SlurmCluster(2) as slurm:
            monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
            options = ["slurm", "-o", f"output={tmp_path}/%j.out"]
            yield lambda words: slurm.command([*LAUNCH, *options, *words])
            wait_until_clean(lambda: slurm.run("squeue", "-h").splitlines())
        return
    program = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich", "ssh": "ssh"}[request.param]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    yield lambda words: hosts.command([*LAUNCH, *on_hosts(hosts, request.param), *words])
    wait_until_clean(lambda: [line for index in range(3) for line in hosts.processes(index)])


def on_hosts(hosts: SshHosts, kind: str) -> Sequence[str]:
    shell, where = hosts.folder / "remote-shell", ["-H", f"{hosts[1].address},{hosts[2].address}"]
    if kind == "ssh":
        return ["ssh", "-o", f"ssh={shell}", *where]
    mpirun = {
        "openmpi": f"mpirun.openmpi --mca plm_rsh_agent {shell} --mca oob_tcp_if_include 10.77.0.0/24",
        "mpich": f"mpirun.mpich -launcher ssh -launcher-exec {shell} -iface eth0",
    }
    return ["mpi", "-o", f"mpirun={mpirun[kind]}", *where]


def test_mnist_trains(launch: jobs.Launch, tmp_path: Path) -> None:
    jobs.check_trains(launch, tmp_path)
