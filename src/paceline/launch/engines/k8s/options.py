"""What a user may say about Kubernetes beyond what every job has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.naming import suggestion

#: Layout by name, and what a cluster needs for it.
LAYOUTS: Mapping[str, str] = {
    "jobset": "JobSet 0.7 or newer",
    "jobs": "Kubernetes 1.24 or newer, nothing else",
    "trainer": "Kubeflow Trainer 2",
    "pods": "any Kubernetes with Jobs: one Job per process, and no DNS is needed",
}

#: The port of the scheduler in its pod.
DEFAULT_PORT = 9091

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of the backend ``k8s``.

    Raises:
        ValueError: an option cannot be; the message says what would be right.
    """

    image: str = ""
    """Image that has Python, paceline, and the workers' command."""
    layout: str = "jobset"
    """One of :data:`LAYOUTS`."""
    namespace: str = ""
    """Where the job runs; empty: the namespace of kubectl's context."""
    python: str = "python3"
    """Interpreter of scheduler and servers in the image."""
    port: int = DEFAULT_PORT
    """Port of the scheduler."""
    pull: str = ""
    """``Always``, ``IfNotPresent`` or ``Never``; empty: the cluster's default."""
    service_account: str = ""
    """Service account of the pods."""
    env_from: tuple[str, ...] = ()
    """Secrets of the namespace whose entries become variables of all processes."""
    directory: str = ""
    """Where the workers' command runs in the pods; empty: where the image says."""
    volumes: tuple[str, ...] = ()
    """``/on/the/node:/in/the/pod[:ro]``, or ``claim=NAME:/in/the/pod[:ro]`` for a PersistentVolumeClaim."""
    shared_memory: str = ""
    """Size of the pods' ``/dev/shm``, as in ``2Gi``; empty: the runtime's default, often 64 MiB."""

    def __post_init__(self) -> None:
        if not self.image:
            raise ValueError("launcher k8s needs an image that has Python and paceline: -o image=NAME")
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}{suggestion(self.layout, LAYOUTS)}: {', '.join(LAYOUTS)}")
        if self.pull not in ("", "Always", "IfNotPresent", "Never"):
            raise ValueError(f"pull={self.pull!r} is not Always, IfNotPresent or Never")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port={self.port} does not exist")
        for name in (self.namespace, *self.env_from):
            if name and not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a name of Kubernetes: lower-case letters, digits and inner hyphens")
        if self.directory and not self.directory.startswith("/"):
            raise ValueError(f"directory={self.directory!r} is not an absolute path")
        for text in self.volumes:
            volume(text, 0)


def volume(text: str, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the volume and the mount that a text describes.

    Raises:
        ValueError: the text has another form.
    """
    source, *where = text.split(":")
    writable = where[1:] != ["ro"]
    if not where or not where[0].startswith("/") or (writable and where[1:]):
        raise ValueError(f"volume {text!r} is not /on/the/node:/in/the/pod[:ro] or claim=NAME:/in/the/pod[:ro]")
    name = f"volume-{index}"
    claim = source.removeprefix("claim=")
    if claim != source:
        content: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim}}
    elif source.startswith("/"):
        content = {"hostPath": {"path": source}}
    else:
        raise ValueError(f"volume {text!r}: {source!r} is neither an absolute path nor claim=NAME")
    mount = {"name": name, "mountPath": where[0]} | ({} if writable else {"readOnly": True})
    return {"name": name, **content}, mount
