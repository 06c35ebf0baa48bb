"""The launcher slurm on a real cluster of three hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch import Host, JobSpec, Machine, backend, parse_group
from paceline.launch.slurm import expand_nodes, place_on_nodes
from paceline.launch.spec_json import from_json, to_json
from paceline.testing.slurm import SlurmCluster, why_no_slurm
from tests.launch.jobs import DEADLINE_S, trained, wait_until_clean, write_training

WHY_NOT = why_no_slurm()


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with SlurmCluster(2, {"new": [1], "old": [2], "all": [1, 2]}) as made:
        yield made


def start(cluster: SlurmCluster, folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    launch = [*before, sys.executable, "-m", "paceline", "launch", "--launcher", "slurm"]
    return subprocess.Popen(
        cluster.command([*launch, *words]),
        cwd=folder,
        env=cluster.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
def test_workers_get_sigterm_before_the_time_limit(cluster: SlurmCluster, tmp_path: Path) -> None:
    text = "trap 'echo saved >saved; exit 0' TERM; echo runs; while :; do sleep 0.1; done"
    command = ["-n", "1", "-s", "0", "-o", "time=1", "-o", "signal=55", "--", "sh", "-c", text]
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


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("h1", ["h1"]),
        ("h[1-3,7],gpu05", ["h1", "h2", "h3", "h7", "gpu05"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_list_of_nodes(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


def test_spec_survives_the_way_into_the_allocation() -> None:
    spec = JobSpec(
        ("train", "a b"), num_servers=1, hosts=(Host("h1", slots=2),), env={"A": "1"}, settings={"age": "3"},
        groups=(parse_group("a: n=2, hosts=h1:22, env=X='y,z', args=-x"),), options={"time": "5"},
    )  # fmt: skip
    assert from_json(to_json(spec)) == spec
    with pytest.raises(ValueError, match="not a job of this version"):
        from_json('{"command": ["x"], "nonsense": 1, "hosts": [], "groups": [], "graces": {}}')


def test_groups_take_the_nodes_of_their_components() -> None:
    spec = JobSpec(("train",), groups=(parse_group("a: n=1"), parse_group("b: n=2")))
    environ = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "h1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
    }
    placed, components = place_on_nodes(spec, environ)
    assert [[host.name for host in group.hosts] for group in placed.groups] == [["h1"], ["n1", "n2"]]
    assert components == {"h1": "0", "n1": "1", "n2": "1"}
    with pytest.raises(ValueError, match="the allocation has 3 components, and the job 2 groups"):
        place_on_nodes(spec, environ | {"SLURM_HET_SIZE": "3"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "x"}, "launcher 'slurm' has no option 'queue'"),
        ({"nodes": "two"}, "-o nodes=two is not a number"),
        ({"signal": "soon"}, "-o signal=soon"),
    ],
)
def test_wrong_option_is_explained(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend("slurm").plan(JobSpec(("train",), 1, options=options), Machine("python", directory="/work"))
