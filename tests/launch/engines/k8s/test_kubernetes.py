"""Pods under the lifecycle of every job, with a kubectl in memory."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from paceline.errors import LaunchError
from paceline.host.exitcodes import PEER_FAILED
from paceline.launch import Graces, JobSpec, Late, Machine, ProcessName
from paceline.launch.engines.k8s import kubernetes as module
from paceline.launch.engines.k8s.kubectl import Kubectl
from paceline.launch.engines.k8s.kubernetes import KubernetesCrew
from paceline.launch.engines.k8s.manifests import make_manifests
from paceline.launch.supervise.console import ERR, OUT, Console
from paceline.launch.supervise.events import Complete, Event, Exited, NotStarted, Ready, Runs, Started
from paceline.launch.supervise.supervisor import SupervisedJob, Surroundings
from tests.launch.engines.k8s.test_kubectl import ended, item

RUNNING = {"running": {}}


class Cluster(Kubectl):
    """A cluster whose pods are what a test says, one listing after the other; the last one stays."""

    def __init__(self, *listings: Sequence[dict[str, Any]], verdicts: Sequence[str] = ()) -> None:
        super().__init__()
        self.listings, self.verdicts = list(listings), list(verdicts)
        self.calls: list[str] = []
        self.texts: list[str] = []
        self.answers = True

    def words(self, words: Sequence[str]) -> list[str]:
        return ["true"]

    def run(self, words: Sequence[str], text: str | None = None, limit_s: float = 1.0) -> str:
        self.calls.append(words[0])
        self.texts += [text] if text else []
        return ""

    def get(self, words: Sequence[str]) -> dict[str, Any]:
        if not self.answers:
            raise LaunchError("kubectl get did not answer")
        if words[0] == "pods":
            return {"items": self.listings.pop(0) if len(self.listings) > 1 else self.listings[0]}
        kind = self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]
        return {"status": {"conditions": [{"type": kind, "status": "True"}]}}

    def follow(self, pod: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["echo", f"I am {pod}"], stdout=subprocess.PIPE)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.01)


def job_spec(workers: int = 2, servers: int = 0, layout: str = "pods", restarts: int = 0, **graces: float) -> JobSpec:
    options = {"image": "i", "layout": layout}
    return JobSpec(("train",), workers, servers, "j", options=options, max_restarts=restarts, graces=Graces(**graces))


def run(cluster: Cluster, spec: JobSpec) -> int:
    manifests = make_manifests(spec, Machine("python3"))
    return SupervisedJob(manifests.plan, lambda around: KubernetesCrew(around, manifests, cluster)).wait()


def over(rank: int, code: int, second: int = 1, role: str = "worker") -> dict[str, Any]:
    state = ended(code, f"2026-01-01T00:00:0{second}Z")
    return item(role, rank, phase="Failed" if code else "Succeeded", state=state)


def test_workers_that_succeed_end_the_job_well(capfd: pytest.CaptureFixture[str]) -> None:
    listings = [item("worker", 0, phase="Pending")], [item("worker", 0, state=RUNNING), over(1, 0)]
    cluster = Cluster(*listings, [over(0, 0), over(1, 0)])
    assert run(cluster, job_spec()) == 0
    assert cluster.calls == ["apply", "delete", "delete"]
    assert capfd.readouterr().out.splitlines().count("[worker 0] I am worker-0-None") == 1


def test_the_first_pod_that_failed_by_itself_is_the_failure(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Cluster([over(0, PEER_FAILED, 1), over(1, 3, 2), over(2, 4, 3)]), job_spec(3)) == 3
    report = capfd.readouterr().err
    assert "worker 1 on worker-1 failed: exit code 3: Error on n1 (pod worker-1-None), " in report
    assert "also left: worker 0 (exit code 76), worker 2 (exit code 4)" in report
    assert "I am worker-1-None" in report.partition("its last lines:")[2]


def test_a_job_whose_members_all_lost_another_has_the_first_of_them_as_failure(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(Cluster([over(0, PEER_FAILED, 2), over(1, PEER_FAILED, 1)]), job_spec()) == PEER_FAILED
    assert "worker 1 on worker-1 failed: exit code 76" in capfd.readouterr().err


def test_an_evicted_pod_fails_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Cluster([item("worker", 0, phase="Failed", reason="Evicted")]), job_spec(1)) == 1
    assert "exit code 1: Evicted on n1" in capfd.readouterr().err


def test_others_may_report_before_everything_is_deleted() -> None:
    cluster = Cluster([over(0, 5), item("worker", 1, state=RUNNING)])
    assert run(cluster, job_spec(survivors_s=0.1)) == 5
    assert cluster.calls == ["apply", "delete", "delete"]


def test_failed_job_is_created_anew_with_the_number_of_the_restart() -> None:
    cluster = Cluster([over(0, 5)], [over(0, 0)])
    assert run(cluster, job_spec(1, restarts=2)) == 0
    assert cluster.calls == ["apply", "delete", "delete"] * 2
    numbers = [text.partition("name: PACELINE_RESTART\n")[2].split()[1] for text in cluster.texts]
    assert numbers == ['"0"', '"1"']


def test_server_that_stays_behind_is_deleted_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([over(0, 0), item("server", 0, state=RUNNING), item("scheduler", 0, state=RUNNING)])
    assert run(cluster, job_spec(1, 1, leave_s=0.1)) == 0
    assert cluster.calls == ["create", "apply", "delete", "delete"]
    assert "all workers are done but scheduler, server 0 did not leave within 0.1 s" in capfd.readouterr().err


def test_cluster_that_falls_silent_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([])
    cluster.answers = False
    with pytest.raises(LaunchError, match="did not answer"):
        run(cluster, job_spec(start_s=0.5))
    assert cluster.calls == ["apply", "delete", "delete"]
    assert "[launch] kubectl get did not answer" in capfd.readouterr().err


def test_failures_in_a_jobset_count_when_it_has_judged() -> None:
    verdicts = ["Suspended", "Suspended", "Completed"]
    assert run(Cluster([over(0, 5)], verdicts=verdicts), job_spec(1, layout="jobset")) == 0
    assert run(Cluster([over(0, 5)], verdicts=["Suspended", "Failed"]), job_spec(1, layout="jobset")) == 5


def test_jobset_that_failed_without_a_pod_that_says_why_is_an_error() -> None:
    with pytest.raises(LaunchError, match="pl-j failed, and no pod says why: kubectl describe jobsets"):
        run(Cluster([], verdicts=["Failed"]), job_spec(1, layout="jobset", survivors_s=0.05))


class Seen:
    """A crew outside of a loop, and its events."""

    def __init__(self, cluster: Cluster, spec: JobSpec) -> None:
        self.events: list[Event] = []
        self.selector = selectors.DefaultSelector()
        self._null = os.open(os.devnull, os.O_WRONLY)
        console, known = Console({OUT: self._null, ERR: self._null}), {Late.RESTART: "0", Late.JOB_KEY: "k"}
        around = Surroundings(self.selector, console, lambda: None, self.events.append, known)
        self.crew = KubernetesCrew(around, make_manifests(spec, Machine("python3")), cluster)

    def close(self) -> None:
        self.crew.finish()
        self.crew.close()
        self.selector.close()
        os.close(self._null)


@pytest.fixture
def seen() -> Iterator[list[Seen]]:
    made: list[Seen] = []
    yield made
    for one in made:
        one.close()


def test_pod_whose_image_does_not_exist_fails_after_the_time_to_start(seen: list[Seen]) -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    one = Seen(Cluster([item("worker", 0, phase="Pending", state=waiting)]), job_spec(1, start_s=1000))
    seen.append(one)
    one.crew.check()
    assert one.events == []
    inner = cast("Any", one.crew)
    inner._began, inner._poll_at = inner._began - 1001, 0.0
    one.crew.check()
    reason = "cannot start: ErrImagePull: not found (pod worker-0-None)"
    assert one.events == [NotStarted(ProcessName("worker", 0), reason)]


def test_nobody_waits_for_the_address_of_a_scheduler_that_is_known_by_name(seen: list[Seen]) -> None:
    one = Seen(Cluster([item("scheduler", 0, state=RUNNING)]), job_spec(1, 1))
    seen.append(one)
    for process in make_manifests(job_spec(1, 1), Machine("python3")).plan:
        one.crew.start(process, {})
    assert one.events == [Ready(), Complete()]
    one.crew.check()
    assert one.events[2:] == [Started(ProcessName("scheduler", 0), "pod scheduler-0-None")]
    one.crew.look([ProcessName("scheduler", 0), ProcessName("worker", 0)])
    assert one.events[3:] == [Runs(ProcessName("scheduler", 0), 0.0)]


def test_every_signal_deletes_the_job_and_ends_what_runs(seen: list[Seen]) -> None:
    cluster = Cluster([over(0, 0), item("worker", 1, state=RUNNING)])
    one = Seen(cluster, job_spec())
    seen.append(one)
    one.crew.check()
    one.crew.send(2, [ProcessName("worker", 1)])
    assert cluster.calls == ["delete", "delete"]
    ends = [event for event in one.events if isinstance(event, Exited)]
    assert [(end.member.rank, end.code) for end in ends] == [(0, 0), (1, 143)]
    assert one.crew.deadline() is None
