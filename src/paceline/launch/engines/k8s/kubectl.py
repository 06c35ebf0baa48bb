"""Calls of kubectl, and its answers about a job. Objects travel on stdin: no secret is a word of a command."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from paceline.errors import LaunchError
from paceline.launch.engines.programs import run_program
from paceline.launch.plan import ProcessName

_CALL_S = 60.0
_PACKAGE = "kubectl, or write the manifests with --dry-run"
_INDEX = "batch.kubernetes.io/job-completion-index"
#: Reasons for which a container waits that time does not mend.
_HOPELESS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
)


class Kubectl:
    """kubectl with the user's own configuration (``KUBECONFIG``, ``~/.kube/config``).

    Args:
        namespace: namespace of all calls; empty: the context's.
    """

    def __init__(self, namespace: str = "") -> None:
        self._base = ["kubectl", *(["--namespace", namespace] if namespace else [])]

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the command line of a call."""
        return [*self._base, *words]

    def run(self, words: Sequence[str], text: str = "", limit_s: float = _CALL_S) -> str:
        """Run one call and return its output.

        Raises:
            LaunchError: it failed; with kubectl's message.
        """
        return run_program(self.words(words), _PACKAGE, text, limit_s=limit_s, name=f"kubectl {words[0]}")

    def get(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the objects that ``kubectl get`` finds."""
        return cast("dict[str, Any]", json.loads(self.run(["get", *words, "--output", "json"])))

    def version(self) -> tuple[int, int]:
        """Return the version of the cluster: ``(1, 31)``."""
        found = json.loads(self.run(["version", "--output", "json"])).get("serverVersion") or {}
        match = re.match(r"v?(\d+)\.(\d+)", str(found.get("gitVersion", "")))
        if match is None:
            raise LaunchError(f"kubectl version tells no version of the cluster: {found}")
        return int(match[1]), int(match[2])

    def follow(self, pod: str) -> subprocess.Popen[bytes]:
        """Start to follow a pod's output, from its beginning to its end."""
        return subprocess.Popen(
            self.words(["logs", "--follow", f"pod/{pod}"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
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
        "running" in state or bool(ended),
        ended.get("exitCode"),
        ended.get("finishedAt") or "",
        ": ".join(str(part) for part in parts if part),
        waiting.get("reason") in _HOPELESS,
    )
