from __future__ import annotations

from typing import Any

from paceline.exitcodes import PEER_FAILED
from paceline.launch import ProcessName
from paceline.launch.engines.k8s.state import first_failure, pods, verdict, workers_done


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


def test_the_first_that_failed_by_itself_is_the_failure() -> None:
    found = pods(
        {
            "items": [
                item("worker", 0, 0, phase="Failed", state=ended(PEER_FAILED, "2026-01-01T00:00:01Z")),
                item("worker", 0, 1, phase="Failed", state=ended(3, "2026-01-01T00:00:02Z")),
                item("worker", 0, 2, phase="Failed", state=ended(4, "2026-01-01T00:00:03Z")),
            ]
        }
    )
    first = first_failure(found)
    assert first is not None
    assert (first.member, first.code, first.reason) == (ProcessName("worker", 1), 3, "Error")


def test_a_job_whose_members_all_lost_another_has_the_first_of_them_as_failure() -> None:
    codes = [(0, "2026-01-01T00:00:02Z"), (1, "2026-01-01T00:00:01Z")]
    items = [item("worker", 0, index, phase="Failed", state=ended(PEER_FAILED, at)) for index, at in codes]
    first = first_failure(pods({"items": items}))
    assert first is not None
    assert first.member == ProcessName("worker", 1)


def test_an_evicted_pod_without_a_container_has_failed() -> None:
    first = first_failure(pods({"items": [item("server", 0, 0, phase="Failed", reason="Evicted")]}))
    assert first is not None
    assert (first.code, first.reason) == (None, "Evicted")


def test_workers_are_done_when_each_rank_has_succeeded() -> None:
    done = ended(0, "2026-01-01T00:00:01Z")
    one = item("worker", 0, 0, phase="Succeeded", state=done)
    other = item("worker", 0, 1, phase="Succeeded", state=done)
    server = item("server", 0, 0, phase="Succeeded", state=done)
    assert not workers_done(pods({"items": [one, server]}), 2)
    assert workers_done(pods({"items": [one, other]}), 2)
    assert first_failure(pods({"items": [one, other]})) is None


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
