from __future__ import annotations

from typing import Any

from paceline.launch import ProcessName
from paceline.launch.engines.k8s.kubectl import pods, verdict


def item(role: str, first: int, index: int | None = None, **status: Any) -> dict[str, Any]:
    """Return a pod as ``kubectl get pods -o json`` prints it."""
    labels = {"paceline-role": role, "paceline-first-rank": str(first)}
    notes = {} if index is None else {"batch.kubernetes.io/job-completion-index": str(index)}
    state = status.pop("state", None)
    containers = [] if state is None else [{"state": state}]
    meta = {"name": f"{role}-{first}-{index}", "labels": labels, "annotations": notes}
    return {"metadata": meta, "spec": {"nodeName": "n1"}, "status": {"containerStatuses": containers, **status}}


def ended(code: int, at: str) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "finishedAt": at, "reason": "Error" if code else "Completed"}}


def test_rank_is_that_of_the_group_and_the_completion_index() -> None:
    found = pods({"items": [item("worker", 2, 1, phase="Running"), item("worker", 0, 0), item("server", 0)]})
    assert [pod.member for pod in found] == [
        ProcessName("server", 0),
        ProcessName("worker", 0),
        ProcessName("worker", 3),
    ]


def test_an_evicted_pod_without_a_container_has_a_reason() -> None:
    [pod] = pods({"items": [item("server", 0, 0, phase="Failed", reason="Evicted")]})
    assert (pod.code, pod.phase, pod.reason) == (None, "Failed", "Evicted")


def test_a_pod_whose_image_does_not_exist_waits_for_nothing() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    [pod] = pods({"items": [item("worker", 0, 0, phase="Pending", state=waiting)]})
    assert (pod.hopeless, pod.has_started, pod.reason) == (True, False, "ErrImagePull: not found")


def test_a_pod_that_waits_for_a_node_is_not_hopeless() -> None:
    conditions = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
    [pod] = pods({"items": [item("worker", 0, 0, phase="Pending", conditions=conditions)]})
    assert (pod.hopeless, pod.reason) == (False, "0/3 nodes are available")


def test_jobset_and_trainjob_say_how_they_ended() -> None:
    def job(*conditions: tuple[str, str]) -> dict[str, Any]:
        return {"status": {"conditions": [{"type": kind, "status": value} for kind, value in conditions]}}

    assert verdict({}) is None
    assert verdict(job(("Suspended", "False"), ("Failed", "False"))) is None
    assert verdict(job(("Completed", "True"))) is True
    assert verdict(job(("Complete", "True"))) is True
    assert verdict(job(("Failed", "True"))) is False
