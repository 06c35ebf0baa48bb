"""The launcher slurm on a real cluster of three hosts."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.slurm import SlurmCluster, why_no_slurm
from tests.engines import small_jobs
from tests.engines.small_jobs import DEADLINE_S, trained, wait_until_clean, write_training

WHY_NOT = why_no_slurm()


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with SlurmCluster(2, {"new": [1], "old": [2], "all": [1, 2]}) as made:
        yield made


def start(
    cluster: SlurmCluster, folder: Path, *words: str, before: tuple[str, ...] = (), **environ: str
) -> subprocess.Popen[str]:
    launch = [*before, sys.executable, "-m", "paceline", "launch", "--launcher", "slurm"]
    return small_jobs.start(cluster.command([*launch, *words]), folder, cluster.environ | environ)


def left(cluster: SlurmCluster) -> list[str]:
    return [one for index in (1, 2) for one in cluster.processes(index)]


@pytest.mark.root
def test_batch_job_trains(cluster: SlurmCluster, tmp_path: Path) -> None:
    command = ["-n", "2", "-s", "2", "-o", "partition=all", "--", sys.executable, write_training(tmp_path)]
    job = start(cluster, tmp_path, *command)
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, out + err
    assert trained(out, ["h1", "h2"]), out
    wait_until_clean(lambda: left(cluster))


@pytest.mark.root
def test_job_runs_inside_an_allocation(cluster: SlurmCluster, tmp_path: Path) -> None:
    text = "echo $RANK $(hostname) $MASTER_ADDR"
    before = ("salloc", "-N2", "-p", "all")
    job = start(cluster, tmp_path, "-n", "2", "-s", "0", "--", "sh", "-c", text, before=before)
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == ["[worker 0] 0 h1 10.77.0.2", "[worker 1] 1 h2 10.77.0.2"]


@pytest.mark.root
def test_variables_for_srun_neither_take_cores_nor_break_the_agents(cluster: SlurmCluster, tmp_path: Path) -> None:
    text = "echo $RANK $SLURM_CPUS_ON_NODE $SRUN_CPUS_PER_TASK $OWN"
    srun = {"SRUN_CPUS_PER_TASK": "1", "SLURM_EXACT": "1", "SLURM_LABELIO": "1", "SRUN_EXPORT_ENV": "NONE"}
    exports = ["env", *(f"{name}={value}" for name, value in srun.items())]
    before = ("salloc", "-N1", "-n2", "--cpus-per-task=2", "-p", "all", *exports)
    job = start(cluster, tmp_path, "-n", "2", "-s", "0", "--", "sh", "-c", text, before=before, OWN="mine")
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == ["[worker 0] 0 4 1 mine", "[worker 1] 1 4 1 mine"]


@pytest.mark.root
def test_variables_for_sbatch_change_nothing_that_the_job_needs(cluster: SlurmCluster, tmp_path: Path) -> None:
    sbatch = {"EXPORT": "NONE", "OUTPUT": "/dev/null", "ARRAY_INX": "0-1", "WAIT": "1", "PARTITION": "none"}
    environ = {f"SBATCH_{name}": value for name, value in sbatch.items()}
    command = ["-n", "1", "-s", "0", "-o", "partition=old", "--", "sh", "-c", "echo $RANK $(hostname)"]
    out, err = start(cluster, tmp_path, *command, **environ).communicate(timeout=DEADLINE_S)
    assert out.splitlines()[1:] == ["[worker 0] 0 h2"], out + err


@pytest.mark.root
@pytest.mark.parametrize("by", ["scancel", "launcher"])
def test_signal_reaches_the_workers_that_handle_it(cluster: SlurmCluster, tmp_path: Path, by: str) -> None:
    text = "trap 'echo saves $RANK; exit 0' USR1; echo $SLURM_JOB_ID runs $RANK; while :; do sleep 0.1; done"
    command = ["-n", "2", "-s", "1", "-o", "partition=all", "--", "sh", "-c", text]
    job = start(cluster, tmp_path, *command)
    assert job.stdout is not None
    runs = list(itertools.islice((line for line in job.stdout if "runs" in line), 2))
    if by == "scancel":
        cluster.run("scancel", "--signal=USR1", runs[0].split()[2])
    else:
        job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, out + err
    assert {"[worker 0] saves 0", "[worker 1] saves 1"} <= set(out.splitlines())


@pytest.mark.root
def test_groups_are_components_of_one_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    groups = [
        "--group",
        "a: n=1, select=partition=new",
        "--group",
        "b: n=2, slots=2, select=partition=old, env=X=a b,c",
    ]
    text = 'echo $RANK $(hostname) $PACELINE_WORKER_GROUP "$X" $PACELINE_WORKER_GROUPS'
    job = start(cluster, tmp_path, *groups, "-s", "0", "--", "sh", "-c", text)
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, out + err
    assert sorted(out.splitlines())[1:] == [
        "[worker 0] 0 h1 a  0; 1 2;",
        "[worker 1] 1 h2 b a b,c 0; 1 2;",
        "[worker 2] 2 h2 b a b,c 0; 1 2;",
    ]


@pytest.mark.root
def test_failure_comes_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    text = "test $RANK = 1 || exec sleep 1000; echo boom >&2; exit 7"
    command = ["-n", "2", "-s", "0", "--grace", "0.5", "-o", "partition=all", "--", "sh", "-c", text]
    job = start(cluster, tmp_path, *command)
    out, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 7
    assert "worker 1 on h2 failed: exit code 7" in out
    assert "    boom\n" in out
    wait_until_clean(lambda: left(cluster))


@pytest.mark.root
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_job_is_cancelled_when_the_launcher_ends(cluster: SlurmCluster, tmp_path: Path, signum: signal.Signals) -> None:
    command = ["-n", "2", "-s", "0", "-o", "partition=all", "--", "sh", "-c", "echo runs; exec sleep 1000"]
    job = start(cluster, tmp_path, *command)
    assert job.stdout is not None
    for line in job.stdout:
        if "runs" in line:
            break
    job.send_signal(signum)
    job.communicate(timeout=DEADLINE_S)
    assert job.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    wait_until_clean(lambda: left(cluster))
    wait_until_clean(lambda: cluster.run("squeue", "-h").splitlines())


@pytest.mark.root
@pytest.mark.slow
def test_workers_get_sigterm_before_the_time_limit(cluster: SlurmCluster, tmp_path: Path) -> None:
    text = "trap 'echo saved >saved; exit 0' TERM; echo runs; while :; do sleep 0.1; done"
    command = ["-n", "1", "-s", "0", "-o", "time=1", "-o", "signal=40", "--", "sh", "-c", text]
    job = start(cluster, tmp_path, *command)
    out, _ = job.communicate(timeout=DEADLINE_S)
    assert (tmp_path / "saved").read_text() == "saved\n", out
    assert job.returncode == 143, out


@pytest.mark.root
def test_refused_job_is_explained(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path, "-n", "1", "-o", "partition=none", "--", "sh")
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 1
    assert "paceline launch: sbatch refused: " in err
    assert "Invalid partition name" in err
