"""Jobs on a real Ray cluster of three nodes, each a host of its own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.hosts import why_no_hosts
from tests.engines import jobs
from tests.engines.named_hosts import NamedHosts
from tests.engines.ray_nodes import RayNodes

VENV = Path(os.environ.get("PACELINE_TEST_ENGINES_VENV", "/nowhere"))
RAY = VENV / "bin" / "ray"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible"),
    pytest.mark.skipif(not RAY.exists(), reason="needs Ray in the environment that PACELINE_TEST_ENGINES_VENV names"),
    pytest.mark.timeout(400),
]

LABELS = ({}, {"pace": "fast"}, {"pace": "slow"})
CPUS = 3


class Cluster:
    """The nodes, and the launcher's command."""

    def __init__(self, hosts: NamedHosts, nodes: RayNodes) -> None:
        self.hosts, self.nodes = hosts, nodes

    def launch(self, words: Sequence[str]) -> list[str]:
        python = str(VENV / "bin" / "python")
        given = ["-m", "paceline", "launch", "--launcher", "ray", "-o", f"address={self.nodes.address}"]
        return self.hosts.command("h1", [python, *given, *words])

    def free_cpus(self) -> float:
        """Ask the cluster."""
        code = (
            f"import ray, json; ray.init({self.nodes.address!r}, log_to_driver=False, logging_level='error');"
            "print(json.dumps(ray.available_resources().get('CPU', 0)))"
        )
        return float(json.loads(self.hosts.run("h1", [str(VENV / "bin" / "python"), "-c", code])))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    env = {"PYTHONPATH": f"{jobs.ROOT / 'src'}:{jobs.ROOT}"}
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise whether the cluster asks for a token depends on an earlier use of Ray by this user.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with NamedHosts(3, folder) as hosts, RayNodes(hosts, RAY, folder, LABELS, CPUS, env) as nodes:
            nodes.wait_for(3)
            yield Cluster(hosts, nodes)


def test_mnist_trains(cluster: Cluster, tmp_path: Path) -> None:
    jobs.check_trains(cluster.launch, tmp_path, ["-o", "strategy=SPREAD"])


def test_failing_worker_ends_the_job_with_its_code_and_traceback(cluster: Cluster) -> None:
    jobs.check_failure(cluster.launch)


def test_ctrl_c_leaves_nothing(cluster: Cluster) -> None:
    jobs.check_end(cluster.launch, lambda job: job.process.send_signal(signal.SIGINT), 130)
    assert cluster.free_cpus() == 3 * CPUS


def test_kill_of_the_launcher_leaves_nothing(cluster: Cluster) -> None:
    jobs.check_end(cluster.launch, lambda job: job.process.kill(), -signal.SIGKILL)


def test_groups_run_on_the_nodes_with_their_labels(cluster: Cluster) -> None:
    command = ["sh", "-c", "echo $PACELINE_WORKER_GROUP $(hostname) $PACELINE_RANK $NOTE"]
    groups = ["--group", "fast: n=2, select=pace=fast", "--group", "slow: n=1, select=pace=slow, env=NOTE='a, b'"]
    job = jobs.start(cluster.launch, ["-s", "0", *groups], command)
    done = job.end()
    assert done.code == 0, done.text
    lines = sorted(line.split("] ", 1)[1] for line in done.out.splitlines() if line.startswith("[worker"))
    assert lines == ["fast h2 0", "fast h2 1", "slow h3 2 a, b"], done.text


def test_hosts_of_a_group_are_nodes_by_address(cluster: Cluster) -> None:
    group = f"a: n=1, hosts={cluster.hosts.address('h3')}"
    done = jobs.start(cluster.launch, ["-s", "0", "--group", group], ["hostname"]).end()
    assert (done.code, done.out) == (0, "[worker 0] h3\n"), done.text


def test_job_that_does_not_fit_says_what_there_is(cluster: Cluster) -> None:
    words = ["-s", "0", "--group", "big: n=2, cpus=64", "-o", "wait=2"]
    done = jobs.start(cluster.launch, words, ["true"]).end(60)
    assert done.code == 1, done.text
    assert "no room for the job for 2 s (PACK)" in done.err
    assert "asked for: CPU=64; CPU=64" in done.err
    assert f"{cluster.hosts.address('h2')}: CPU=3" in done.err


def test_cluster_that_asks_for_a_token_is_named_with_the_way_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name)
    done = jobs.start(cluster.launch, ["-s", "0", "-n", "1"], ["true"]).end(120)
    assert done.code == 1, done.text
    assert "no Ray cluster: " in done.err
    assert "set RAY_AUTH_MODE=token" in done.err


def test_without_a_cluster_the_error_says_so(cluster: Cluster) -> None:
    python = str(VENV / "bin" / "python")
    words = ["launch", "--launcher", "ray", "-o", "address=10.77.0.1:1", "-n", "1", "-s", "0", "--", "true"]
    command = cluster.hosts.command("h1", [python, "-m", "paceline", *words])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=jobs.ROOT,
        env={**os.environ, "PYTHONPATH": str(jobs.ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 1
    assert "no Ray cluster" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_that_dies_is_reported_by_ray(cluster: Cluster) -> None:
    """The last test: it costs the cluster a node."""
    words = ["-s", "0", "--group", "slow: n=1, select=pace=slow"]
    job = jobs.start(cluster.launch, words, ["sh", "-c", "echo here; exec sleep 300"])
    job.wait_until(lambda: any("sleep 300" in line for line in job.processes().values()))
    cluster.nodes.kill("h3")
    done = job.end(120)
    assert done.code != 0
    assert "Ray says" in done.err, done.text
    assert "worker 0 on worker-0 failed" in done.err, done.text
    job.check_gone()
