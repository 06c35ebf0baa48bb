"""Pod templates of a job, which are alike in all layouts, and the options of users. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline import config
from paceline.launch.plan import JobPart, Late, ProcessSpec, address_parts
from paceline.launch.worker_groups import WorkerGroup
from paceline.naming import suggestion

Object: TypeAlias = dict[str, Any]

#: Layout by name, and a cluster's needs for it.
LAYOUTS: Mapping[str, str] = {
    "jobset": "JobSet 0.7 or newer",
    "jobs": "Kubernetes 1.24 or newer, nothing else",
    "trainer": "Kubeflow Trainer 2",
    "pods": "any Kubernetes with Jobs: one Job per process, and no DNS is needed",
}

#: The port of the scheduler in its pod.
DEFAULT_PORT = 9091

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

#: What differs between the processes of one part of a job: all else is in the template they share.
_RANKS = (config.variable("rank"), "RANK")
#: Entry of the Secret.
KEY = "job-key"
#: Late values of launchers that start the scheduler themselves: its pipes to them, and the secret of its page.
_NOT_HERE = (Late.READY_FD, Late.ENDED_FD, Late.PAGE_TOKEN)

#: How long a process may take to end after SIGTERM. It is not process 1 of its namespace, which would ignore the signal
#: unless it handles it: hence ``shareProcessNamespace``.
_TERM_GRACE_S = 15


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of the backend ``k8s``."""

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


@dataclass(frozen=True)
class Places:
    """How the processes of a layout find each other. Texts of Kubernetes: ``$(NAME)`` is a variable's value."""

    scheduler: str
    """Host of the scheduler."""
    master: str
    """Host of worker 0."""
    restart: Object
    """The variable that says how often the job was started again, without its name."""
    needs: tuple[Object, ...] = ()
    """Variables that the two texts refer to."""


def labels(name: str) -> dict[str, str]:
    """Return the labels of everything that belongs to a job."""
    return {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": name}


def pod_template(
    job: str, part: JobPart, options: KubernetesOptions, places: Places, process: ProcessSpec | None = None
) -> Object:
    """Return the template of the pods of a part of a job, or of one process, in layouts with a template for each.

    Pods of one template are told apart by the completion index.
    """
    indexed = process is None
    one = process or part.processes[0]
    marks = {"paceline-role": part.role, "paceline-first-rank": str(part.first_rank if indexed else one.rank)}
    volumes = [volume(text, index) for index, text in enumerate(options.volumes)]
    if options.shared_memory:
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}
        volumes.append((shm, {"name": "shm", "mountPath": "/dev/shm"}))
    container: Object = {"name": part.role, "image": options.image}
    container |= {"imagePullPolicy": options.pull} if options.pull else {}
    container |= _command(part, one, indexed)
    container |= {"workingDir": options.directory} if options.directory and part.role == "worker" else {}
    container["env"] = _env(part, one, indexed, f"{job}-key", options.port, places)
    container |= {"envFrom": [{"secretRef": {"name": name}} for name in options.env_from]} if options.env_from else {}
    container |= _ports(part, options.port)
    container |= _resources(part.group)
    container |= {"volumeMounts": [mount for _, mount in volumes]} if volumes else {}
    spec: Object = {"restartPolicy": "Never", "terminationGracePeriodSeconds": _TERM_GRACE_S}
    spec |= {"shareProcessNamespace": True, "containers": [container]}
    spec |= {"serviceAccountName": options.service_account} if options.service_account else {}
    spec |= {"nodeSelector": dict(part.group.select)} if part.group is not None and part.group.select else {}
    spec |= {"volumes": [one for one, _ in volumes]} if volumes else {}
    return {"metadata": {"labels": labels(job) | marks}, "spec": spec}


def job_spec(count: int, template: Object, *, indexed: bool) -> Object:
    """Return the spec of a Job that runs ``count`` pods at once, and gives up at the first failure."""
    spec: Object = {"completionMode": "Indexed"} if indexed else {}
    return {"backoffLimit": 0, "completions": count, "parallelism": count, **spec, "template": template}


def literal(text: str) -> str:
    """Return a text so that Kubernetes replaces nothing in it: it takes ``$(NAME)`` and ``$$`` for more."""
    return text.replace("$", "$$")


def _command(part: JobPart, process: ProcessSpec, indexed: bool) -> Object:
    words = [literal(word) for word in process.argv]
    if not indexed or part.role == "scheduler":
        return {"command": words}
    ranks = [name for name in _RANKS if name in process.env]
    exports = "".join(f"export {name}=$(({part.first_rank} + JOB_COMPLETION_INDEX)); " for name in ranks)
    return {"command": ["/bin/sh", "-c", literal(f'{exports}exec "$@"'), "sh", *words]}


def _env(part: JobPart, process: ProcessSpec, indexed: bool, secret: str, port: int, places: Places) -> list[Object]:
    known = {
        Late.BIND: f"tcp://0.0.0.0:{port}",
        **address_parts(f"tcp://{places.scheduler}:{port}"),
        Late.MASTER_ADDR: places.master,
        Late.MASTER_PORT: "29500",
    }
    env: list[Object] = list(places.needs) if part.role != "scheduler" else []
    for name, value in process.env.items():
        if value in _NOT_HERE or (indexed and name in _RANKS and part.role != "scheduler"):
            continue
        if value is Late.JOB_KEY:
            env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": KEY}}})
        elif value is Late.RESTART:
            env.append({"name": name, **places.restart})
        else:
            env.append({"name": name, "value": known[value] if isinstance(value, Late) else literal(value)})
    return env


def _ports(part: JobPart, port: int) -> Object:
    """Return the scheduler's port, and a probe: servers and workers are created when it listens."""
    if part.role != "scheduler":
        return {}
    probe = {"tcpSocket": {"port": port}, "periodSeconds": 1, "failureThreshold": 60}
    return {"ports": [{"name": "scheduler", "containerPort": port}], "readinessProbe": probe}


def _resources(group: WorkerGroup | None) -> Object:
    given: Mapping[str, str] = group.resources if group is not None else {}
    names = {"cpus": "cpu", "memory": "memory", "gpus": "nvidia.com/gpu"}
    amounts = {names[name]: _quantity(name, text) for name, text in given.items()}
    return {"resources": {"requests": amounts, "limits": amounts}} if amounts else {}


def _quantity(name: str, text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?(m|k|[KMGT]i?)?", text):
        raise ValueError(f"{name}={text!r} is not an amount such as 4, 500m or 8Gi")
    return text
