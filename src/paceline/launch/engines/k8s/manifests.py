"""The objects of a job, by layout, and as YAML. Pure: the same arguments make the same objects.

| layout | objects | who starts the job again after a failure |
|---|---|---|
| ``jobset`` | Secret, JobSet | the JobSet's failure policy |
| ``trainer`` | Secret, ClusterTrainingRuntime, TrainJob | the JobSet's failure policy |
| ``jobs`` | Secret, headless Service, an Indexed Job per part of the job | the launcher |
| ``pods`` | Secret, Services, a Job per process | the launcher |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.launch.backends import typed_options
from paceline.launch.engines.k8s.pods import (
    KEY,
    KubernetesOptions,
    Object,
    Places,
    job_spec,
    labels,
    pod_template,
)
from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import JobPart, JobPlan, Late, job_parts
from paceline.launch.planner import Machine, make_plan

_RESTART_LABEL = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_COORDINATOR = "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
_COORDINATOR_VARIABLE = "SCHEDULER_HOST"
_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_MASTER_PORT = 29500
#: After which Kubernetes deletes a JobSet that has ended, if no launcher is left to do it.
TTL_S = 3600

MASKED = "***"

#: Words that every reader of YAML takes for a string: no number, no yes or no, no null.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
#: A character of two surrogates, and the control character that JSON leaves as it is.
_BEYOND_JSON = re.compile(r"\\ud[89ab]..\\ud[c-f]..|\x7f")
_NOT_STRINGS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


@dataclass(frozen=True)
class Manifests:
    """The input of ``kubectl``."""

    name: str
    """The job's name; all objects have it in a label."""
    options: KubernetesOptions
    objects: tuple[Object, ...]
    """All objects but the Secret, in the order of their creation."""
    spec: JobSpec
    plan: JobPlan
    machine: Machine

    def secret(self, key: str) -> Object:
        """Return the Secret that holds the job's key."""
        meta = {"name": f"{self.name}-key", "labels": labels(self.name)}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "stringData": {KEY: key}}

    @property
    def text(self) -> str:
        """All objects as YAML, the key masked."""
        return documents([*([self.secret(MASKED)] if self.plan.needs(Late.JOB_KEY) else []), *self.objects])


def make_manifests(spec: JobSpec, machine: Machine, restart: int = 0) -> Manifests:
    """Turn a job spec into objects; the interpreter and cores of this machine do not count.

    ``restart`` says how often the launcher has started the job again, in layouts where it does.

    Raises:
        ValueError: an option is impossible, or the layout cannot satisfy the spec.
    """
    options = typed_options("k8s", KubernetesOptions, spec.options)
    elsewhere = replace(machine, python=options.python, cores={}, directory="")
    plan = make_plan(spec, elsewhere, alone=True)
    name = f"pl-{spec.job_id}"  # not paceline-: Kubernetes makes variables of the names of Services
    parts = job_parts(spec, plan)
    if options.layout == "jobset":
        objects = [_jobset(name, parts, options, spec)]
    elif options.layout == "trainer":
        objects = _trainer(name, parts, options, spec)
    elif options.layout == "jobs":
        objects = _jobs(name, parts, options, spec, restart)
    else:
        objects = _pods(name, parts, options, spec, restart)
    return Manifests(name, options, tuple(objects), spec, plan, machine)


def _meta(name: str, job: str) -> Object:
    return {"name": name, "labels": labels(job)}


def _jobset(name: str, parts: list[JobPart], options: KubernetesOptions, spec: JobSpec) -> Object:
    worker = next(part for part in parts if part.role == "worker")
    places = Places(
        f"{name}-scheduler-0-0.{name}",
        f"{name}-{worker.name}-0-0.{name}",
        {"valueFrom": {"fieldRef": {"fieldPath": _RESTART_LABEL}}},
    )
    body = _jobset_spec(name, parts, options, spec, places) | {"ttlSecondsAfterFinished": TTL_S}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _meta(name, name), "spec": body}


def _jobset_spec(name: str, parts: list[JobPart], options: KubernetesOptions, spec: JobSpec, places: Places) -> Object:
    """Return the JobSet: servers start when the scheduler listens, workers when servers run; workers decide success."""
    replicated: list[Object] = []
    for part in parts:
        template = pod_template(name, part, options, places)
        one: Object = {"name": part.name, "replicas": 1}
        one["template"] = {"spec": job_spec(len(part.processes), template, indexed=True)}
        before = "server" if part.role == "worker" else "scheduler"
        if part.role != "scheduler" and spec.servers:
            one["dependsOn"] = [{"name": before, "status": "Ready"}]
        replicated.append(one)
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {
            "operator": "All",
            "targetReplicatedJobs": [part.name for part in parts if part.role == "worker"],
        },
        "failurePolicy": {"maxRestarts": spec.max_restarts},
        "replicatedJobs": replicated,
    }


def _trainer(name: str, parts: list[JobPart], options: KubernetesOptions, spec: JobSpec) -> list[Object]:
    """Return a runtime for jobs of this shape, and one TrainJob of it.

    Kubeflow names the JobSet after the TrainJob, which the runtime does not know. So the scheduler is the JobSet's
    coordinator, and its address an annotation of every pod.
    """
    if not spec.servers:
        raise ValueError("layout trainer needs a scheduler and servers; Kubeflow's torch-distributed runs without")
    if len(spec.groups) > 1:
        raise ValueError("layout trainer has one worker group; layout jobset has several")
    address = {"name": _COORDINATOR_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": _COORDINATOR}}}
    host = f"$({_COORDINATOR_VARIABLE})"
    restart = {"valueFrom": {"fieldRef": {"fieldPath": _RESTART_LABEL}}}
    if spec.torchrun_env:
        raise ValueError("layout trainer does not set MASTER_ADDR: add --no-torchrun-env")
    parts = [replace(part, name="node") if part.role == "worker" else part for part in parts]
    body = _jobset_spec(name, parts, options, spec, Places(host, "", restart, (address,)))
    body["coordinator"] = {"replicatedJob": "scheduler", "jobIndex": 0, "podIndex": 0}
    node = body["replicatedJobs"][-1]
    node["template"] = {"metadata": {"labels": dict(_ANCESTOR)}, **node["template"]}
    container = node["template"]["spec"]["template"]["spec"]["containers"][0]
    container["name"] = "node"
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": labels(name) | {"trainer.kubeflow.org/framework": "paceline"}},
        "spec": {"mlPolicy": {"numNodes": spec.num_workers}, "template": {"spec": body}},
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _meta(name, name),
        "spec": {
            "runtimeRef": {"kind": "ClusterTrainingRuntime", "name": name},
            "trainer": {"numNodes": spec.num_workers, "command": list(container["command"])},
        },
    }
    return [runtime, train_job]


def _jobs(name: str, parts: list[JobPart], options: KubernetesOptions, spec: JobSpec, restart: int) -> list[Object]:
    worker = next(part for part in parts if part.role == "worker")
    places = Places(f"{name}-scheduler-0.{name}", f"{name}-{worker.name}-0.{name}", {"value": str(restart)})
    service = _service(name, name, {"clusterIP": "None", "publishNotReadyAddresses": True}, labels(name))
    objects = [service]
    for part in parts:
        template = pod_template(name, part, options, places)
        template["spec"]["subdomain"] = name
        objects.append(_job(f"{name}-{part.name}", name, job_spec(len(part.processes), template, indexed=True)))
    return objects


def _pods(name: str, parts: list[JobPart], options: KubernetesOptions, spec: JobSpec, restart: int) -> list[Object]:
    objects: list[Object] = []
    if spec.servers:
        marks = labels(name) | {"paceline-role": "scheduler"}
        objects.append(_service(f"{name}-scheduler", name, _port("scheduler", options.port), marks))
    if spec.torchrun_env:
        marks = labels(name) | {"paceline-role": "worker", "paceline-first-rank": "0"}
        objects.append(_service(f"{name}-master", name, _port("master", _MASTER_PORT), marks))
    places = Places(_service_host(f"{name}-scheduler"), _service_host(f"{name}-master"), {"value": str(restart)})
    for part in parts:
        for process in part.processes:
            template = pod_template(name, part, options, places, process)
            objects.append(_job(f"{name}-{process.host}", name, job_spec(1, template, indexed=False)))
    return objects


def _service_host(service: str) -> str:
    """Return the variable that pods created after a Service have its address in."""
    return f"$({service.upper().replace('-', '_')}_SERVICE_HOST)"


def _port(name: str, port: int) -> Object:
    return {"ports": [{"name": name, "port": port, "targetPort": port}]}


def _service(name: str, job: str, spec: Object, selector: dict[str, str]) -> Object:
    body = {**spec, "selector": selector}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(name, job), "spec": body}


def _job(name: str, job: str, spec: Object) -> Object:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(name, job), "spec": spec}


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return a stream of documents, each of one object."""
    return "---\n".join("\n".join(_lines(one)) + "\n" for one in objects)


def _lines(value: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for key, inner in value.items():
        head = f"{_scalar(key)}:"
        if isinstance(inner, Mapping) and inner:
            lines += [head, *(f"  {line}" for line in _lines(inner))]
        elif isinstance(inner, list | tuple) and inner:
            lines += [head, *_items(inner)]
        else:
            lines.append(f"{head} {_scalar(inner)}")
    return lines


def _items(values: Iterable[Any]) -> list[str]:
    lines: list[str] = []
    for value in values:
        if isinstance(value, Mapping) and value:
            first, *rest = _lines(value)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            lines.append(f"- {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_STRINGS:
        return value
    return _BEYOND_JSON.sub(_escaped, json.dumps(value))  # JSON is YAML too, but for these


def _escaped(match: re.Match[str]) -> str:
    text = match.group()
    return f"\\U{ord(json.loads(chr(34) + text + chr(34))):08x}"
