"""What the objects of a job say about how it goes. Pure: from the JSON that ``kubectl get`` prints.

The first failure is the container that ended first with an exit code other than 0 and ``PEER_FAILED``; else the first
with ``PEER_FAILED``, as :mod:`paceline.launch.supervise.lifecycle` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.exitcodes import PEER_FAILED
from paceline.launch.plan import ProcessName

_INDEX = "batch.kubernetes.io/job-completion-index"
#: Reasons for which a container waits that time does not mend.
_HOPELESS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
)


@dataclass(frozen=True)
class Pod:
    """One pod of a job."""

    name: str
    member: ProcessName
    node: str
    phase: str
    has_started: bool
    code: int | None
    """Exit code of its container, if it has ended."""
    ended: str
    """When it ended, in RFC 3339; texts compare as times do."""
    reason: str
    """Why it does not run, or how it ended, in the engine's words."""
    hopeless: bool
    """It waits for what will not come."""


def pods(listing: Mapping[str, Any]) -> list[Pod]:
    """Return the pods of a list, by role and rank."""
    found = [_pod(item) for item in listing.get("items", ())]
    return sorted(found, key=lambda pod: (pod.member, pod.name))


def first_failure(found: Sequence[Pod]) -> Pod | None:
    """Return the pod that failed first, or None."""
    failed = [pod for pod in found if pod.code not in (None, 0) or pod.phase == "Failed"]
    own = [pod for pod in failed if pod.code != PEER_FAILED]
    return min(own or failed, key=lambda pod: (pod.ended or "9", pod.member), default=None)


def workers_done(found: Sequence[Pod], count: int) -> bool:
    """Tell whether all workers have ended well."""
    return len({pod.member for pod in found if pod.member.role == "worker" and pod.phase == "Succeeded"}) == count


def verdict(job: Mapping[str, Any]) -> bool | None:
    """Return whether a JobSet or TrainJob has ended well; None while it goes on."""
    status = job.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("Completed", "Complete"):
            return True
        if condition.get("status") == "True" and condition.get("type") == "Failed":
            return False
    return None


def _pod(item: Mapping[str, Any]) -> Pod:
    meta, status = item["metadata"], item.get("status") or {}
    marks, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    index = int(notes.get(_INDEX) or marks.get(_INDEX) or 0)
    member = ProcessName(marks.get("paceline-role", "worker"), int(marks.get("paceline-first-rank", 0)) + index)
    states = [one.get("state") or {} for one in status.get("containerStatuses") or ()]
    state: Mapping[str, Any] = states[0] if states else {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    unscheduled = [
        str(one.get("message", ""))
        for one in status.get("conditions") or ()
        if one.get("type") == "PodScheduled" and one.get("status") == "False"
    ]
    parts = [ended.get("reason"), waiting.get("reason"), waiting.get("message"), status.get("reason"), *unscheduled]
    return Pod(
        meta["name"],
        member,
        (item.get("spec") or {}).get("nodeName", ""),
        status.get("phase", "Pending"),
        bool(state.get("running") or ended),
        ended.get("exitCode"),
        ended.get("finishedAt") or "",
        ": ".join(str(part) for part in parts if part),
        waiting.get("reason") in _HOPELESS,
    )
