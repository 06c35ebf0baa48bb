"""Jobs on a real Kubernetes of a control plane and two nodes: ``nox -s k8s``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.hosts import why_no_hosts
from tests.engines import jobs
from tests.engines.kubernetes_build import IMAGE
from tests.engines.kubernetes_cluster import KubernetesCluster, why_no_kubernetes
from tests.engines.named_hosts import NamedHosts

WHY_NOT = why_no_hosts() or why_no_kubernetes()
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible"),
    pytest.mark.timeout(400),
]

#: Kinds of which nothing may be left.
KINDS = "jobs,pods,services,secrets"


class Cluster:
    """The cluster, and the launcher's command.

    Args:
        hosts: the first is where the launcher runs.
        kubernetes: on them.
        results: a folder that pods can write to.
    """

    def __init__(self, hosts: NamedHosts, kubernetes: KubernetesCluster, results: Path) -> None:
        self.hosts, self.kubernetes, self.results = hosts, kubernetes, results

    def launch(self, words: Sequence[str], layout: str = "pods") -> list[str]:
        """Return the command that launches a job; its pods have this machine's Python and the checkout as volumes."""
        folders = dict.fromkeys(["/usr", sys.prefix, sys.base_prefix, str(jobs.ROOT)])
        volumes = ",".join([*(f"{path}:{path}:ro" for path in folders), f"{self.results}:{self.results}"])
        options = {
            "image": IMAGE,
            "layout": layout,
            "pull": "Never",
            "python": jobs.PYTHON,
            "directory": str(jobs.ROOT),
            "volumes": volumes,
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        given += ["--env", f"PYTHONPATH={jobs.ROOT / 'src'}:{jobs.ROOT}"]
        launcher = [jobs.PYTHON, "-m", "paceline", "launch", "--launcher", "k8s"]
        return self.hosts.command("h1", [*launcher, *given, *words])

    def paceline(self, *words: str) -> str:
        """Run a command of paceline where the launcher runs, and return what it printed."""
        return self.hosts.run("h1", [jobs.PYTHON, "-m", "paceline", *words], os.environ, 150)

    def left(self) -> str:
        """Return the objects of jobs that are left."""
        return self.kubernetes.kubectl("get", KINDS, "-l", "app.kubernetes.io/name=paceline", "-o", "name")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="paceline-k8s-", dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "results").mkdir()
        with NamedHosts(3, folder) as hosts, KubernetesCluster(hosts, folder) as kubernetes:
            yield Cluster(hosts, kubernetes, folder / "results")


@pytest.fixture(autouse=True)
def _environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KUBECONFIG", cluster.kubernetes.environment["KUBECONFIG"])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(cluster.results))
    monkeypatch.setenv("PYTHONPATH", f"{jobs.ROOT / 'src'}:{jobs.ROOT}")
    yield
    assert cluster.left() == ""


def test_objects_of_the_golden_file_are_accepted(cluster: Cluster) -> None:
    """The API server checks them in full, and keeps none."""
    golden = jobs.ROOT / "tests" / "launch" / "engines" / "k8s" / "golden" / "pods.yaml"
    told = cluster.kubernetes.kubectl("create", "--dry-run=server", "-f", str(golden)).splitlines()
    assert len(told) == golden.read_text().count("\nkind:")
    assert all(line.endswith(" created (server dry run)") for line in told)


def test_mnist_trains(cluster: Cluster) -> None:
    jobs.check_trains(cluster.launch, cluster.results)


def test_failing_worker_ends_the_job_with_its_code_and_traceback(cluster: Cluster) -> None:
    job = jobs.start(cluster.launch, ["-n", "2", "-s", "1"], [jobs.PYTHON, "-c", jobs.FAILS])
    done = job.end()
    assert done.code == 7, done.text
    assert "[worker 1] RuntimeError: this one breaks" in done.out, done.text
    assert "worker 1 failed: exit code 7: Error on h" in done.err, done.text
    job.check_gone()


def test_ctrl_c_leaves_nothing(cluster: Cluster) -> None:
    jobs.check_end(cluster.launch, lambda job: job.process.send_signal(signal.SIGINT), 130)


def test_paceline_kill_leaves_nothing(cluster: Cluster) -> None:
    def end(job: jobs.Running) -> None:
        assert "time.sleep(300)" in cluster.paceline("jobs")
        cluster.paceline("kill")

    jobs.check_end(cluster.launch, end, 128 + signal.SIGTERM)


def test_kill_of_the_launcher_leaves_nothing(cluster: Cluster) -> None:
    job = jobs.start(cluster.launch, ["-n", "2", "-s", "1"], [jobs.PYTHON, "-c", jobs.STAYS])
    job.wait_until(lambda: jobs.roles_of(job) >= 3)
    job.process.kill()
    assert job.end().code == -signal.SIGKILL
    jobs.wait_for(lambda: cluster.left() == "", 120)
    job.check_gone()


def test_job_is_started_again_after_a_failure(cluster: Cluster) -> None:
    """The layout asks for Indexed Jobs, which Kubernetes 1.20 does not have."""
    command = ["sh", "-c", "echo restart $PACELINE_RESTART; test $PACELINE_RESTART = 1"]
    words = ["-n", "1", "-s", "0", "--max-restarts", "2"]
    done = jobs.start(lambda given: cluster.launch(given, "jobs"), words, command).end()
    assert done.code == 0, done.text
    assert "Kubernetes 1.20 has no Indexed Jobs: a Job per process" in done.err
    assert "[worker 0] restart 0" in done.out
    assert "[worker 0] restart 1" in done.out


def test_cluster_without_jobset_is_named_with_what_works(cluster: Cluster) -> None:
    done = jobs.start(lambda given: cluster.launch(given, "jobset"), ["-n", "1"], ["true"]).end(60)
    assert done.code == 1
    assert "the cluster has no jobsets.jobset.x-k8s.io: layout jobset needs JobSet 0.7 or newer" in done.err


def test_cluster_that_does_not_answer_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "kubeconfig"
    wrong.write_text(Path(cluster.kubernetes.environment["KUBECONFIG"]).read_text().replace(":6443", ":6444"))
    done = jobs.start(cluster.launch, ["-n", "1"], ["true"], {"KUBECONFIG": str(wrong)}).end(60)
    assert done.code == 1
    assert "kubectl api-resources" in done.err, done.text


def test_words_with_dollars_and_quotes_arrive(cluster: Cluster) -> None:
    command = ["sh", "-c", 'echo "$A" "$1"', "sh", "$(Y) $$"]
    done = jobs.start(cluster.launch, ["-n", "1", "-s", "0", "--env", "A=$(X) 'b' $$"], command).end()
    assert "[worker 0] $(X) 'b' $$ $(Y) $$" in done.out, done.text


def test_an_image_that_does_not_exist_is_named(cluster: Cluster) -> None:
    words = ["-n", "1", "-s", "0", "-o", "image=localhost/absent:1", "--start-timeout", "5"]
    done = jobs.start(cluster.launch, words, ["true"]).end(120)
    assert done.code == 1
    assert "worker 0 failed: cannot start: ErrImageNeverPull" in done.err, done.text


def test_killed_worker_is_a_failure(cluster: Cluster) -> None:
    job = jobs.start(cluster.launch, ["-n", "2", "-s", "1"], [jobs.PYTHON, "-c", jobs.STAYS])
    job.wait_until(lambda: jobs.roles_of(job) >= 3)
    pid = next(pid for pid, line in job.processes().items() if "time.sleep(300)" in line)
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
    done = job.end()
    assert done.code == 137, done.text
    job.check_gone()
